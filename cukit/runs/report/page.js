"use strict";
// Draws the curves and lists the completions. What a model or a file wrote is only ever set as text.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const [WIDE_LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [50, 10, 12, 24, 200];
  const FEW = 30; // points of a curve that is drawn with dots and not smoothed
  const NEVER_SMOOTHED = new Set(["learning_rate", "num_tokens", "epoch", "elapsed seconds"]);

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }
  function drawn(tag, className, attributes) {
    const made = document.createElementNS(SVG, tag);
    if (className) made.setAttribute("class", className);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  }
  function label(x, y, anchor, text) {
    const made = drawn("text", "", { x, y, "text-anchor": anchor });
    made.textContent = text;
    return made;
  }
  const color = (run) => "c" + (run % 8);
  const inOrder = (a, b) => a - b;

  function short(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
    for (const [limit, letter] of [[1e9, "G"], [1e6, "M"]])
      if (size >= limit) return Number((value / limit).toPrecision(3)) + "\u00a0" + letter;
    return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }
  function seconds(value) {
    if (value < 120) return short(value) + " s";
    return value < 7200 ? (value / 60).toFixed(1) + " min" : (value / 3600).toFixed(1) + " h";
  }
  function ticks(low, high, most) {
    const raw = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5].find((one) => one * power >= raw * 0.999) || 10);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 12; n++)
      found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  // ---- series ----

  const runs = data.runs.map((run, place) => ({
    ...run,
    place,
    shown: true,
    metrics: new Map(run.metrics.map(([name, axis, values]) => [name, { x: run.axes[axis], y: values }])),
  }));
  const AXES = [
    ["step", "step", null, short],
    ["tokens", "tokens", "num_tokens", short],
    ["time", "training time", "elapsed seconds", seconds],
  ];
  let axis = AXES[0];
  let smoothing = 0;

  /** The place of steps on the axis that is chosen; null where the run does not know it. */
  function placed(run, steps) {
    if (!axis[2]) return steps;
    const known = run.metrics.get(axis[2]);
    if (!known) return null;
    let at = 0;
    return steps.map((step) => {
      while (at < known.x.length - 1 && known.x[at] < step) at++;
      const [x1, y1] = [known.x[at], known.y[at]];
      const [x0, y0] = at ? [known.x[at - 1], known.y[at - 1]] : [0, 0];
      return x1 === x0 || step >= x1 ? y1 : y0 + ((y1 - y0) * (step - x0)) / (x1 - x0);
    });
  }
  /** An exponential mean that starts without a bias towards 0; a gap stays a gap. */
  function smooth(values) {
    let [mean, weight] = [0, 0];
    return values.map((value) => {
      if (value === null) return null;
      mean = smoothing * mean + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return mean / weight;
    });
  }
  function path(points) {
    let text = "";
    let pen = "M";
    for (const [x, y] of points) {
      if (y === null) pen = "M";
      else {
        text += pen + x.toFixed(1) + " " + y.toFixed(1);
        pen = "L";
      }
    }
    return text;
  }
  function nearest(xs, x) {
    let [low, high] = [0, xs.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle;
      else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  // ---- charts ----

  const charts = [];

  class Plot {
    /** Axes, a grid, and hover by mouse, finger or arrow keys; a subclass draws what is inside. */
    constructor(title, about, home) {
      this.svg = drawn("svg", "", { tabindex: 0, role: "img", "aria-label": title });
      this.tip = element("div", "tip");
      this.tip.hidden = true;
      this.value = element("span", "value");
      this.caption = element("figcaption", "", element("b", "", title), this.value, element("span", "about", about));
      this.figure = element("figure", "chart", this.caption, element("div", "plot", this.svg, this.tip));
      home.append(this.figure);
      charts.push(this);
      this.svg.addEventListener("pointermove", (event) => {
        const box = this.svg.getBoundingClientRect();
        hover(this, this.fromPixel(event.clientX - box.left));
      });
      for (const name of ["pointerleave", "blur"]) this.svg.addEventListener(name, () => hover(null, null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }
    key(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const xs = this.places();
      if (!move || !xs.length) return;
      event.preventDefault();
      const now = hovered === null ? (move > 0 ? -1 : xs.length) : nearest(xs, hovered);
      hover(this, xs[Math.max(0, Math.min(xs.length - 1, now + move))]);
    }
    scale(lowX, highX, low, high) {
      const width = Math.max(this.svg.clientWidth, 120);
      const left = WIDE_LEFT;
      [this.lowX, this.highX, this.left, this.width] = [lowX, highX, left, width];
      const acrossX = (width - left - RIGHT) / (highX - lowX || 1);
      const acrossY = (HEIGHT - TOP - BOTTOM) / (high - low || 1);
      this.toX = (x) => left + (x - lowX) * acrossX;
      this.toY = (y) => HEIGHT - BOTTOM - (y - low) * acrossY;
      this.fromPixel = (pixel) => Math.min(highX, Math.max(lowX, lowX + (pixel - left) / acrossX));
      const marks = [];
      for (const y of ticks(low, high, 4)) {
        const at = Math.round(this.toY(y)) + 0.5;
        marks.push(drawn("path", "grid", { d: `M${left} ${at}H${width - RIGHT}` }), label(left - 7, at + 3.5, "end", short(y)));
      }
      const many = width > 300 ? 5 : 3;
      for (const x of ticks(lowX, highX, many)) {
        const at = this.toX(x);
        const anchor = at > width - 24 ? "end" : at < left + 12 ? "start" : "middle";
        marks.push(label(Math.min(at, width - 2), HEIGHT - 6, anchor, axis[3](x)));
      }
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      return marks;
    }
    /** The line of the hover, and the tip beside it with rows [class, name, text]. */
    point(x, own, heading, rows, dots) {
      this.cursor?.remove();
      this.cursor = null;
      this.tip.hidden = true;
      if (x === null || !this.toX || x < this.lowX || x > this.highX) return;
      const at = this.toX(x);
      this.cursor = drawn("g");
      this.cursor.append(drawn("path", "cross", { d: `M${at} ${TOP}V${HEIGHT - BOTTOM}` }));
      for (const [className, cx, cy] of dots) this.cursor.append(drawn("circle", "point " + className, { cx, cy, r: 3.5 }));
      this.svg.append(this.cursor);
      if (!own) return;
      this.tip.replaceChildren(element("div", "", heading));
      for (const [className, name, text] of rows)
        this.tip.append(element("div", className, element("i", "dot"), element("span", "", name), element("b", "", text)));
      this.tip.hidden = false;
      const room = this.tip.offsetWidth + 14;
      const start = at + room > this.width ? Math.max(0, at - room) : at + 14;
      this.tip.style.transform = `translate(${start}px, ${TOP}px)`;
    }
  }

  class Curves extends Plot {
    constructor(chart, closes) {
      super(chart.title, chart.about, byId("charts"));
      this.metric = chart.metric;
      if (closes) {
        const close = element("button", "close", "×");
        close.type = "button";
        close.setAttribute("aria-label", "remove this curve");
        close.addEventListener("click", () => {
          charts.splice(charts.indexOf(this), 1);
          this.figure.remove();
        });
        this.caption.append(close);
      }
    }
    places() {
      return [...new Set(this.lines.flatMap((line) => line.x))].sort(inOrder);
    }
    draw() {
      this.lines = [];
      for (const run of runs) {
        const found = run.shown && run.metrics.get(this.metric);
        const x = found && placed(run, found.x);
        if (x && x.length) {
          const few = x.length < FEW;
          this.lines.push({ run, x, raw: found.y, y: few || !smoothing || NEVER_SMOOTHED.has(this.metric) ? found.y : smooth(found.y), few });
        }
      }
      let [low, high, lowX, highX] = [Infinity, -Infinity, Infinity, -Infinity];
      for (const line of this.lines) {
        for (const value of line.raw)
          if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
        [lowX, highX] = [Math.min(lowX, line.x[0]), Math.max(highX, line.x[line.x.length - 1])];
      }
      this.value.textContent = "";
      if (low > high) {
        this.svg.replaceChildren(label(12, 60, "start", "no value for this choice"));
        this.toX = null;
        return;
      }
      if (low >= 0 && low < high * 0.35) low = 0;
      if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low * 2), Math.max(0, high * 2)];
      const room = (high - low) * 0.04;
      const inside = this.scale(Math.min(lowX, lowX > highX * 0.2 ? lowX : 0), highX, low === 0 ? 0 : low - room, high + room);
      for (const line of this.lines) {
        const kind = color(line.run.place) + (line.run.place >= 8 ? " dashed" : "");
        const at = (values) => path(line.x.map((x, i) => [this.toX(x), values[i] === null ? null : this.toY(values[i])]));
        if (line.y !== line.raw) inside.push(drawn("path", "line raw " + kind, { d: at(line.raw) }));
        inside.push(drawn("path", "line " + kind, { d: at(line.y) }));
        if (line.few)
          line.x.forEach((x, i) => {
            if (line.y[i] !== null)
              inside.push(drawn("circle", "point " + kind, { cx: this.toX(x), cy: this.toY(line.y[i]), r: 2.6 }));
          });
        for (const step of axis[2] ? [] : line.run.resumed)
          if (step > this.lowX && step < highX)
            inside.push(drawn("path", "resumed", { d: `M${this.toX(step)} ${TOP}V${HEIGHT - BOTTOM}` }));
      }
      this.svg.replaceChildren(...inside);
      this.show(null, false);
    }
    show(x, own) {
      if (!this.toX) return;
      const [rows, dots] = [[], []];
      let heading = "";
      for (const { run, x: xs, y, raw } of this.lines) {
        const i = x === null ? xs.length - 1 : nearest(xs, x);
        const kind = color(run.place);
        const smoothed = y[i] !== raw[i] ? ` (${short(raw[i])})` : "";
        rows.push([kind, runs.length > 1 ? run.name : this.metric, short(y[i]) + smoothed]);
        if (y[i] !== null && x !== null) dots.push([kind, this.toX(xs[i]), this.toY(y[i])]);
        heading = `${axis[1]} ${axis[3](xs[i])}`;
      }
      this.value.textContent = this.lines.length === 1 ? rows[0][2] : "";
      this.value.className = "value " + (this.lines.length === 1 ? rows[0][0] : "");
      this.point(x, own, heading, rows, dots);
    }
  }

  class Phases extends Plot {
    constructor(run) {
      super(runs.length > 1 ? run.name : "Seconds a step", "stacked by phase", byId("phases"));
      const { steps, names, values } = run.phases;
      const totals = values.map((column) => column.reduce((a, b) => a + b, 0));
      const all = totals.reduce((a, b) => a + b, 0) || 1;
      this.order = names.map((_, i) => i).filter((i) => totals[i] > 0).sort((a, b) => totals[b] - totals[a]);
      [this.run, this.steps, this.names, this.columns] = [run, steps, names, values];
      const keys = element("div", "keys");
      this.order.forEach((i, place) => {
        const share = ((100 * totals[i]) / all).toFixed(totals[i] / all < 0.1 ? 1 : 0);
        keys.append(element("span", color(place), element("i", "dot"), `${names[i]} ${share} %`));
      });
      this.caption.after(keys);
    }
    places() {
      return this.xs;
    }
    draw() {
      this.xs = placed(this.run, this.steps) || this.steps;
      const sums = this.xs.map(() => 0);
      const bands = this.order.map((i) => this.columns[i].map((value, at) => [sums[at], (sums[at] += value)]));
      const last = this.xs[this.xs.length - 1];
      const inside = this.scale(this.xs.length > 1 ? this.xs[0] : 0, last, 0, Math.max(...sums) * 1.04 || 1);
      const shapes = bands.map((band, place) => {
        const xs = this.xs.length > 1 ? this.xs : [0, last];
        const at = (i) => band[Math.min(i, band.length - 1)];
        const over = xs.map((x, i) => `${this.toX(x).toFixed(1)} ${this.toY(at(i)[1]).toFixed(1)}`);
        const under = xs.map((x, i) => `${this.toX(x).toFixed(1)} ${this.toY(at(i)[0]).toFixed(1)}`).reverse();
        return drawn("path", "area " + color(place), { d: `M${over.join("L")}L${under.join("L")}Z` });
      });
      this.svg.replaceChildren(...shapes, ...inside);
      this.show(null, false);
    }
    show(x, own) {
      const i = x === null ? this.xs.length - 1 : nearest(this.xs, x);
      const rows = this.order.map((k, place) => [color(place), this.names[k], seconds(this.columns[k][i])]);
      const sum = this.order.reduce((total, k) => total + this.columns[k][i], 0);
      this.value.textContent = seconds(sum);
      this.point(x, own, `${axis[1]} ${axis[3](this.xs[i])}`, rows, []);
    }
  }

  let hovered = null;
  function hover(own, x) {
    hovered = x;
    for (const chart of charts) chart.show(x, chart === own);
  }
  const drawAll = () => charts.forEach((chart) => chart.draw());

  function setUpCurves() {
    for (const chart of data.charts) new Curves(chart, false);
    for (const run of runs) if (run.phases) new Phases(run);
    byId("phases-section").hidden = !runs.some((run) => run.phases);
    byId("curve-tools").hidden = !charts.length;
    if (runs.length > 1)
      for (const run of runs) {
        const button = element("button", color(run.place), element("i", "dot"), run.name);
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          run.shown = !run.shown;
          button.setAttribute("aria-pressed", String(run.shown));
          drawAll();
        });
        byId("legend").append(button);
      }
    byId("smoothing").addEventListener("input", (event) => {
      smoothing = Number(event.target.value);
      byId("smoothing-value").textContent = smoothing ? smoothing.toFixed(2) : "0";
      drawAll();
    });
    for (const one of AXES)
      if (!one[2] || runs.some((run) => run.metrics.has(one[2]))) byId("axis").append(new Option(one[1], one[0]));
    byId("axis").addEventListener("change", (event) => {
      axis = AXES.find((one) => one[0] === event.target.value);
      drawAll();
    });
    const more = byId("more");
    more.append(new Option("choose …", ""));
    const taken = new Set(data.charts.map((chart) => chart.metric));
    const names = new Set(runs.flatMap((run) => [...run.metrics.keys()]));
    for (const name of [...names].sort()) if (!taken.has(name)) more.append(new Option(name));
    more.addEventListener("change", () => {
      if (more.value) {
        const added = new Curves({ title: more.value, about: "", metric: more.value }, true);
        added.draw();
        added.figure.scrollIntoView({ block: "nearest" });
      }
      more.value = "";
    });
    new ResizeObserver(drawAll).observe(byId("charts"));
    drawAll();
  }

  // ---- completions ----

  const PAGE = 24;
  const rows = runs.flatMap((run) => run.completions.map((row) => ({ ...row, run })));
  const saidBy = (row) => row.prompt.map((message) => message[1]).join("\n");
  const rewardOf = (row, name) => row.rewards.find((one) => one[0] === name)?.[1] ?? null;
  const probability = (logprob) => (logprob === null ? "unknown" : short(100 * Math.exp(logprob)) + " %");
  const heatOf = (logprob) => {
    const p = logprob === null ? 1 : Math.exp(logprob);
    return "h" + [0.9, 0.5, 0.2, 0.05].filter((limit) => p < limit).length;
  };
  const least = (row) => (row.leastLogprob ??= Math.min(0, ...(row.logprobs || []).filter((one) => one !== null)));
  let found = [];
  let shownCount = 0;
  let lastGroup = null;

  function numberIn(id) {
    const text = byId(id).value.trim();
    return text === "" ? null : Number(text);
  }
  function search() {
    const text = byId("text").value.toLowerCase();
    const [from, to, low, high] = ["from", "to", "least", "most"].map(numberIn);
    const [run, name, reason, kind, order] = ["run", "reward", "reason", "kind", "order"].map((id) => byId(id).value);
    found = rows.filter((row) => {
      const reward = rewardOf(row, name);
      return (
        (run === "" || row.run.place === Number(run)) &&
        (from === null || row.step >= from) &&
        (to === null || row.step <= to) &&
        (low === null || (reward !== null && reward >= low)) &&
        (high === null || (reward !== null && reward <= high)) &&
        (reason === "" || row.reason === reason) &&
        (kind === "" || (kind === "eval") === row.eval) &&
        (text === "" || (row.lower ??= (saidBy(row) + "\n" + row.text).toLowerCase()).includes(text))
      );
    });
    const reward = (row, none) => rewardOf(row, name) ?? none;
    const by = {
      last: (a, b) => b.step - a.step,
      first: (a, b) => a.step - b.step,
      high: (a, b) => reward(b, -Infinity) - reward(a, -Infinity) || 0,
      low: (a, b) => reward(a, Infinity) - reward(b, Infinity) || 0,
      long: (a, b) => (b.length ?? 0) - (a.length ?? 0),
      unsure: (a, b) => least(a) - least(b),
    }[order];
    found.sort(by);
    const steps = new Set(rows.map((row) => row.run.place + " " + row.step)).size;
    const logged = runs.reduce((sum, run) => sum + run.completion_steps, 0);
    byId("found").textContent =
      `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} completions` +
      (steps < logged ? `, of ${steps.toLocaleString("en")} steps out of ${logged.toLocaleString("en")} that were logged` : "");
    [shownCount, lastGroup] = [0, null];
    byId("completions").replaceChildren();
    showMore();
  }
  function showMore() {
    const grouped = ["last", "first"].includes(byId("order").value);
    for (const row of found.slice(shownCount, shownCount + PAGE)) {
      const group = [row.run.place, row.step, row.eval, row.eval ? "" : saidBy(row)].join(" ");
      if (grouped && group !== lastGroup) byId("completions").append(heading(row));
      lastGroup = group;
      byId("completions").append(item(row, !grouped, !grouped || row.eval));
    }
    shownCount += PAGE;
    byId("show-more").hidden = shownCount >= found.length;
  }
  function heading(row) {
    const name = runs.length > 1 ? row.run.name + " · " : "";
    const last = row.prompt[row.prompt.length - 1]?.[1] ?? "";
    const about = row.eval ? "evaluation" : last.length > 160 ? last.slice(0, 160) + "…" : last;
    return element("p", "group " + color(row.run.place), element("b", "", `${name}step ${short(row.step)}`), element("span", "", about));
  }
  function item(row, withStep, withPrompt) {
    const summary = element("summary", color(row.run.place));
    const name = byId("reward").value;
    const reward = rewardOf(row, name);
    summary.append(element("span", "chip" + (reward >= 1 ? " good" : ""), reward === null ? "no reward" : short(reward)));
    if (withStep) summary.append(element("span", "small", (runs.length > 1 ? row.run.name + " · " : "") + "step " + row.step));
    const last = row.prompt[row.prompt.length - 1]?.[1] ?? "";
    const text = row.text.trim().replace(/\s+/g, " ");
    const start = withPrompt ? last.trim().replace(/\s+/g, " ").slice(0, 60) + "  →  " : "";
    summary.append(element("span", "first", (start + text).slice(0, 240) || "(empty)"));
    if (row.advantage !== undefined) summary.append(element("span", "small", "adv " + (row.advantage > 0 ? "+" : "") + short(row.advantage)));
    const ended = row.reason && row.reason !== "stop" ? ", " + row.reason : "";
    if (row.length !== undefined) summary.append(element("span", "small", short(row.length) + " tokens" + ended));
    const details = element("details", "row", summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(inside(row));
    });
    return details;
  }
  function inside(row) {
    const made = element("div", "inside");
    for (const [role, text] of row.prompt)
      made.append(element("h4", "", role || "prompt"), element("pre", "said", text));
    made.append(element("h4", "", "completion"));
    if (row.tokens) {
      const said = element("pre", "said");
      row.tokens.forEach((token, i) => {
        const span = element("span", heatOf(row.logprobs[i]), token);
        span.title = `${JSON.stringify(token)}: log-prob ${short(row.logprobs[i])}, ${probability(row.logprobs[i])}`;
        span.dataset.at = i;
        said.append(span);
      });
      const about = element("div", "numbers", "point at a token, or tap it, for its probability");
      const tell = (event) => {
        const i = event.target.dataset?.at;
        if (i === undefined) return;
        said.querySelector(".at")?.classList.remove("at");
        event.target.classList.add("at");
        about.textContent = `token ${Number(i) + 1} ${event.target.title}`;
      };
      said.addEventListener("pointerover", tell);
      said.addEventListener("click", tell);
      made.append(said, about);
    } else made.append(element("pre", "said", row.text));
    if (row.cut) made.append(element("p", "found", "The rest is in completions.jsonl."));
    const numbers = element("div", "numbers", element("span", "", `step ${row.step}`));
    for (const [name, value] of row.rewards) numbers.append(element("span", "", `${name} ${short(value)}`));
    for (const [name, value] of [["advantage", row.advantage], ["tokens", row.length]])
      if (value !== undefined) numbers.append(element("span", "", `${name} ${short(value)}`));
    if (row.reason) numbers.append(element("span", "", `ended by ${row.reason}`));
    made.append(numbers);
    return made;
  }

  function setUpCompletions() {
    if (!rows.length) {
      byId("found").textContent = "No completions were logged.";
      return;
    }
    byId("completion-tools").hidden = false;
    byId("heat-key").hidden = !rows.some((row) => row.tokens);
    byId("heat").addEventListener("change", (event) => byId("completions").classList.toggle("cold", !event.target.checked));
    byId("run").append(new Option("all", ""), ...runs.map((run) => new Option(run.name, run.place)));
    byId("run-label").hidden = runs.length < 2;
    const names = [...new Set(rows.flatMap((row) => row.rewards.map((one) => one[0])))];
    byId("reward").append(...names.map((name) => new Option(name)));
    byId("reward-label").hidden = names.length < 2;
    const reasons = [...new Set(rows.map((row) => row.reason).filter(Boolean))].sort();
    byId("reason").append(new Option("any", ""), ...reasons.map((reason) => new Option(reason)));
    let timer = 0;
    const soon = () => {
      clearTimeout(timer);
      timer = setTimeout(search, 120);
    };
    byId("completion-tools").addEventListener("input", soon);
    byId("completion-tools").addEventListener("submit", (event) => event.preventDefault());
    byId("show-more").addEventListener("click", showMore);
    search();
  }

  setUpCurves();
  setUpCompletions();
  if (runs.length > 1) {
    byId("differences-label").hidden = false;
    byId("differences").addEventListener("change", (event) => byId("options").classList.toggle("only-different", event.target.checked));
  }
  document.documentElement.dataset.ready = "yes";
})();
