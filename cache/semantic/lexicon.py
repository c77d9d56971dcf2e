"""English words that the guard knows, by what they decide. Data alone."""
# ruff: noqa: SIM905 - lists of words read better as lines of words

from __future__ import annotations

CONTRACTIONS = {
    "can't": "can not", "cannot": "can not", "won't": "will not", "shan't": "shall not", "what's": "what is",
    "who's": "who is", "where's": "where is", "when's": "when is", "why's": "why is", "how's": "how is",
    "that's": "that is", "there's": "there is", "it's": "it is", "i'm": "i am", "let's": "let us",
    "you're": "you are", "we're": "we are", "they're": "they are", "i've": "i have", "i'll": "i will",
}  # fmt: skip

SPELLINGS = {
    "metre": "meter", "metres": "meters", "kilometre": "kilometer", "kilometres": "kilometers", "litre": "liter",
    "litres": "liters", "millilitre": "milliliter", "millilitres": "milliliters", "centimetre": "centimeter",
    "centimetres": "centimeters", "colour": "color", "colours": "colors", "favourite": "favorite", "centre": "center",
    "grey": "gray", "neighbour": "neighbor", "neighbours": "neighbors", "behaviour": "behavior", "organise": "organize",
    "theatre": "theater", "programme": "program", "travelling": "traveling", "analyse": "analyze",
}  # fmt: skip

# Words that stand for each other wherever they stand.
SAME = {
    "purchase": "buy", "purchased": "bought", "purchasing": "buying", "photo": "picture", "photos": "pictures",
    "photograph": "picture", "film": "movie", "films": "movies", "repair": "fix", "repairing": "fixing",
    "telephone": "phone", "bicycle": "bike", "automobile": "car", "television": "tv", "anybody": "anyone",
    "everybody": "everyone", "somebody": "someone", "nobody": "noone", "which": "what", "each": "every",
    "begin": "start", "begins": "starts", "began": "started", "larger": "bigger", "largest": "biggest",
    "large": "big", "attorney": "lawyer", "physician": "doctor", "centigrade": "celsius", "okay": "ok",
    "are": "is", "am": "is", "were": "was",
}  # fmt: skip

NUMBERS = {
    word: str(value)
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty".split()
    )
} | {
    "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80", "ninety": "90",
    "first": "1st", "third": "3rd", "fourth": "4th", "fifth": "5th", "sixth": "6th", "seventh": "7th",
    "eighth": "8th", "ninth": "9th", "tenth": "10th",
}  # fmt: skip
MAGNITUDES = frozenset("hundred thousand million billion trillion dozen half quarter double triple once twice".split())

SYMBOLS = {"%": "percent", "$": "dollars", "€": "euros", "£": "pounds", "¥": "yen", "₹": "rupees"}

# Abbreviations count as units only right after a number, and only in this case: 5 mW is not 5 MW.
ABBREVIATIONS = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "ft": "feet", "foot": "feet",
    "mi": "miles", "kg": "kilograms", "kilogram": "kilograms", "g": "grams", "mg": "milligrams", "mcg": "micrograms",
    "lb": "pounds_weight", "lbs": "pounds_weight", "oz": "ounces", "l": "liters", "L": "liters", "ml": "milliliters",
    "mL": "milliliters", "ms": "milliseconds", "s": "seconds", "sec": "seconds", "min": "minutes", "mins": "minutes",
    "h": "hours", "hr": "hours", "hrs": "hours", "kB": "kilobytes", "MB": "megabytes", "GB": "gigabytes",
    "TB": "terabytes", "mph": "miles per hour", "kph": "kilometers per hour", "K": "kelvin", "tbsp": "tablespoon",
    "tsp": "teaspoon", "USD": "dollars", "EUR": "euros", "GBP": "pounds", "am": "am", "pm": "pm", "kW": "kilowatts",
    "MW": "megawatts", "mW": "milliwatts", "kWh": "kilowatthours", "dB": "decibels", "Hz": "hertz",
}  # fmt: skip

UNITS = frozenset(
    "meter kilometer centimeter millimeter mile inch foot feet yard acre hectare gram kilogram milligram microgram "
    "pound pounds_weight ounce ton liter milliliter gallon pint cup tablespoon teaspoon second minute hour day week "
    "month year decade century millisecond byte kilobyte megabyte gigabyte terabyte celsius fahrenheit kelvin degree "
    "percent dollar euro yen yuan rupee peso franc cent volt amp watt kilowatt megawatt kilowatthour decibel hertz "
    "joule calorie mph kph km kg cm mm mg mcg ml gb mb tb kb kw".split()
)

DATES = frozenset(
    "january february march april may june july august september october november december monday tuesday wednesday "
    "thursday friday saturday sunday today tomorrow yesterday tonight morning noon afternoon evening night midnight "
    "spring summer autumn winter weekend bc ad bce ce am pm q1 q2 q3 q4 now currently ago next last previous past "
    "future before after during until since easter christmas".split()
)
MONTHS = frozenset("january february march april may june july august september october november december".split())

NEGATORS = frozenset(
    "not no never none noone nothing nowhere neither nor without hardly barely avoid except unless lack lacks".split()
)
NEGATING_PREFIXES = ("un", "non", "non-", "dis", "in", "im", "ir", "il", "anti", "mis", "de")

QUANTIFIERS = frozenset(
    "all some any every most many much few a_few a_little a_lot several both either neither no none only just "
    "always sometimes often never usually rarely ever at_least at_most more less fewer than exactly about around "
    "almost nearly half first last once twice again another other same whole entire everyone anyone someone "
    "everything anything something".split()
)

# With one of these in a question, it matters where `not` stands.
SCOPES = QUANTIFIERS | frozenset("and or but to that if because since while than yet even also too i'd".split())

DIRECTIONS = frozenset(
    "from to into onto out in on off up down over under above below before after through toward towards against for "
    "by with without between behind inside outside left right north south east west back forward away upstairs "
    "downstairs via per than".split()
)

GREETINGS = frozenset("hi hello hey".split())
QUESTIONS = frozenset("what who whom whose where when why how".split())
MEASURES = frozenset(
    "many much long old far often big tall high fast deep heavy wide late early soon large small hot cold good".split()
)

OPPOSITES = tuple(
    tuple(pair.split("/"))
    for pair in (
        "enable/disable increase/decrease increase/reduce raise/lower best/worst good/bad better/worse highest/lowest "
        "high/low maximum/minimum max/min biggest/smallest big/small most/least more/less more/fewer start/stop "
        "start/end open/close open/closed open/shut safe/dangerous safe/unsafe harmful/harmless dangerous/harmless "
        "add/remove add/delete insert/delete create/delete create/destroy advantages/disadvantages pros/cons "
        "benefits/drawbacks benefits/risks happy/sad show/hide rising/falling rise/fall mute/unmute lock/unlock "
        "for/against gain/lose win/lose winner/loser accept/decline accept/reject allow/deny allow/forbid "
        "allow/block cheap/expensive cheapest/priciest strongest/weakest strong/weak hot/cold warm/cold fast/slow "
        "fastest/slowest early/late earliest/latest old/new old/young oldest/youngest oldest/newest first/last "
        "buy/sell bought/sold lend/borrow give/take give/get send/receive push/pull upload/download import/export "
        "encode/decode encrypt/decrypt compress/decompress zip/unzip enter/exit enter/leave arrive/leave "
        "arrive/depart login/logout deposit/withdraw connect/disconnect attach/detach mount/unmount install/uninstall "
        "subscribe/unsubscribe follow/unfollow like/dislike love/hate agree/disagree legal/illegal possible/impossible "
        "true/false right/wrong correct/incorrect on/off up/down in/out left/right north/south east/west "
        "before/after above/below over/under inside/outside with/without always/never all/none everyone/noone "
        "everything/nothing day/night summer/winter male/female man/woman men/women boy/girl boys/girls "
        "father/mother brother/sister son/daughter husband/wife adult/child adults/children import/export "
        "input/output positive/negative plus/minus add/subtract multiply/divide ascending/descending "
        "minimum/maximum include/exclude public/private internal/external import/export light/dark wet/dry "
        "hard/soft hard/easy easy/difficult full/empty rich/poor healthy/unhealthy alive/dead asleep/awake "
        "paid/unpaid past/future sunrise/sunset hire/fire pass/fail passed/failed success/failure friend/enemy "
        "parent/child teacher/student buyer/seller employer/employee landlord/tenant plaintiff/defendant "
        "long/short longest/shortest tall/short tallest/shortest wide/narrow deep/shallow heavy/light thick/thin "
        "increases/decreases improve/worsen strengthen/weaken attack/defend ally/enemy question/answer"
    ).split()
)

ARTICLES = frozenset(("a", "an", "the"))
EMPTY = frozenset("do does please".split())

# Order of content is compared without these.
FUNCTION = (
    ARTICLES
    | EMPTY
    | QUESTIONS
    | frozenset(
        "is was be been being did has have had will would can could should shall may might must of and or but if then "
        "that this these those it its he she they them his her their my your our i you we me us as so there here "
        "howto list".split()
    )
)

# What a question may begin with. Its case says nothing at the head of a sentence, since none of them is a name.
ASKING = QUESTIONS | frozenset(
    "which is are was were am do does did has have had can could would should shall might must may will".split()
)
COMMON = frozenset("coffee tea water bread rice people dogs cats flights events advice ideas tips recipe list".split())
OPENERS = (
    (ASKING - frozenset(("may", "will", "am")))
    | GREETINGS
    | frozenset(
        "please thanks explain describe list write tell give show convert translate compare define calculate name "
        "summarize summarise recommend suggest help let find make create send turn open close rename delete remove "
        "insert subtract multiply divide solve compute simplify round draw plan remind what's kindly "
        "the this that these those there my our your their its his her we they you she "
        "more less some any every most many much few all both each another several copy count".split()
    )
    | COMMON
)

# At the head of a sentence these may be names or chemical elements, unless what follows shows that they are not.
SHORT_OPENERS = frozenset(
    "may will am in as at he be no it on to by of if an so for with from during when after before or and but".split()
)
SUBJECTS = frozenset(
    "i you he she it we they the an this that these those there my your his her its our their who what which when "
    "where how why is was has does did can could would should some any every all most people least costs takes".split()
)
OBJECTS = frozenset("this his its yours always perhaps dishes chores exercises squats pushups".split())

# `I` after one of these is who asks, unless one of those follows.
BEFORE_PRONOUN = frozenset(
    "do did can cannot could would should shall will may might must am was have had if when where why how "
    "that than because after before while since until but so which who whom whether can't don't didn't couldn't "
    "shouldn't won't haven't not".split()
)
AFTER_LETTERS = frozenset("and or is in of mean stand equal rise fall flow".split())
PRONOUN_S = frozenset("was always sometimes perhaps focus".split())  # no other word in -s follows who asks

# Names and languages that are no word in lower case: case adds nothing to them.
NAMES = frozenset(
    "france germany spain italy portugal england scotland ireland britain russia ukraine poland sweden norway denmark "
    "belgium austria switzerland greece hungary canada mexico australia argentina colombia venezuela peru india korea "
    "vietnam thailand egypt kenya nigeria iran iraq israel pakistan europe asia africa america antarctica "
    "london paris berlin madrid rome lisbon dublin moscow tokyo seoul beijing toronto sydney chicago boston london "
    "amsterdam stockholm oslo helsinki prague budapest warsaw athens california texas florida "
    "spanish french german italian portuguese russian japanese korean arabic hindi "
    "monday tuesday wednesday thursday friday saturday sunday "
    "mondays tuesdays wednesdays thursdays fridays saturdays sundays "
    "january february april june july september october november december halloween christmas easter "
    "shakespeare einstein mozart beethoven picasso hitler gandhi hamlet "
    "google facebook instagram netflix wikipedia gmail linux celsius fahrenheit".split()
)
# The same for names with a spelling of their own.
SPELLED = frozenset("DNA HTML CSS JSON PDF USB NASA iPhone YouTube WhatsApp GitHub WiFi JavaScript".split())

# Where a question is about one of these, its last sign may be what it is about.
ABOUT_SIGNS = frozenset(
    "regex regexp regexes expression expressions glob wildcard wildcards pattern patterns syntax operator operators "
    "nullable optional type types symbol symbols sign signs punctuation mark marks character characters".split()
)

# Questions whose answers change with time.
FLEETING = frozenset("today tonight tomorrow yesterday now currently latest nowadays recent recently".split())
