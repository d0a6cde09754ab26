"""Words behind a number: those that are units in a formula, and those that are never units."""

# Units that count as such even where letters are variables (`14 cm` without \\text).
UNITS = frozenset(
    """mm cm dm km nm ft yd mi kg mg lb lbs oz ml mL cl dl kl gal hr hrs min mins sec secs ms mph kph rpm km/h
    inch inches foot feet yard yards mile miles meter meters metre metres centimeter centimeters kilometer kilometers
    gram grams kilogram kilograms pound pounds ounce ounces ton tons liter liters litre litres gallon gallons
    second seconds minute minutes hour hours day days week weeks month months year years
    dollar dollars cent cents euro euros degree degrees percent unit units square cubic
    people person students apples""".lower().split()
)
# Single letters that are units in running text (`14\\text{ m}`); any other letter is a variable or a multiple (6 k).
LETTER_UNITS = frozenset("mgshlLVWNJ")
# Words that make another number, or more than one answer, of what stands before them.
NO_UNITS = frozenset(
    """or and to plus minus times over by divided multiplied mod modulo base point than not no
    hundred hundreds thousand thousands million millions billion billions trillion trillions bn mn mil dozen dozens
    score half halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths hundredth hundredths
    squared cubed root factorial double triple twice negative positive remainder
    zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    st nd rd th pi sqrt frac if but except about around approximately approx between through until is are equals equal
    cannot impossible false wrong maybe either""".split()
)
