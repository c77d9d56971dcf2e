"""English words that the guard knows, by what they decide. Data alone."""
# ruff: noqa: SIM905 - lists of words read better as lines of words

from __future__ import annotations

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
NEGATORS = frozenset(
    "not no never none nobody noone nothing nowhere neither nor without hardly barely avoid except unless lack lacks "
    "cannot".split()
)
NEGATING_PREFIXES = ("un", "non", "non-", "dis", "in", "im", "ir", "il", "anti", "mis", "de")

QUANTIFIERS = frozenset(
    "all some any every most many much few several both either neither no none only just "
    "always sometimes often never usually rarely ever more less fewer than exactly about around "
    "almost nearly half first last once twice again another other same whole entire everyone anyone someone "
    "everybody anybody somebody nobody "
    "everything anything something".split()
)

DIRECTIONS = frozenset(
    "from to into onto out in on off up down over under above below before after through toward towards against for "
    "by with without between behind inside outside left right north south east west back forward away upstairs "
    "downstairs via per than".split()
)

QUESTIONS = frozenset("what who whom whose which where when why how".split())
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
        "increases/decreases improve/worsen strengthen/weaken attack/defend ally/enemy "
        "question/answer "
        "large/small larger/smaller largest/smallest"
    ).split()
)

ARTICLES = frozenset(("a", "an", "the"))

# Words whose meaning depends on the word that follows.
BOUND = ARTICLES | frozenset("not do does did be is are was were".split())

# Order of content is compared without these.
FUNCTION = (
    ARTICLES
    | QUESTIONS
    | frozenset(
        "do does please is was be been being did has have had will would can could should shall may might must of and "
        "or but if then that this these those it its he she they them his her their my your our i you we me us as so "
        "there here list".split()
    )
)

# Questions whose answers change with time.
FLEETING = frozenset("today tonight tomorrow yesterday now currently latest nowadays recent recently".split())

# The sets below decide which variations `words` ignores when it compares questions for equality.

# A question with one of these words may be about how something is written: no variation is ignored.
ABOUT_TEXT = frozenset(
    "word words letter letters spell spells spelled spelling spelt character characters char chars string strings "
    "sentence sentences phrase phrases paragraph text texts message prompt question questions line lines title "
    "apostrophe apostrophes contraction contractions comma commas period hyphen punctuation punctuate mark marks sign "
    "signs symbol symbols space spaces spacing blank blanks whitespace typo typos grammar grammatical grammatically "
    "ungrammatical correct corrected incorrect correctly uppercase lowercase capitals capitalize capitalise "
    "capitalized capitalised capitalization capitalisation caps rewrite rephrase paraphrase reword proofread edit "
    "repeat echo quote quoted quotation verbatim syllable syllables abbreviation abbreviations abbreviate acronym "
    "anagram palindrome regex regexp regexes expression expressions glob wildcard wildcards pattern patterns syntax "
    "operator operators nullable optional type types ascii unicode utf encode encoded encoding token tokens tokenize "
    "tokenizer hash md5 sha base64".split()
)
# A question with one of these words may mention words rather than use them, or contain code.
MENTIONING = frozenset(
    "translate translates translated translation say says said pronounce pronounced pronunciation mean means meant "
    "meaning define definition defined named called rhyme rhymes rhyming verb verbs noun nouns adjective pronoun "
    "prefix suffix plural singular tense print prints printed keyword keywords function functions method methods "
    "variable variables attribute tag query script code python java javascript typescript ruby perl rust golang css "
    "html sql xml json yaml bash shell linux git api".split()
)

APOSTROPHES = {
    word.replace("'", ""): word
    for word in (
        "what's where's who's how's that's don't doesn't didn't isn't aren't wasn't weren't couldn't wouldn't "
        "shouldn't haven't hasn't"
    ).split()
}

GREETINGS = frozenset("hi hello hey thanks".split())
FAREWELLS = frozenset("please thanks".split())

HELPERS = frozenset(
    "is are was were do does did can can't could will won't would shall should has have had may might must".split()
)
# Words that begin a question and never another sentence.
ASKING = frozenset("is are was were does did could would should shall has had".split())
# Words that begin a request.
REQUESTS = frozenset(
    "explain describe list tell give show write suggest recommend summarize summarise compare translate convert "
    "calculate name define find".split()
)
OPENERS = (
    ASKING
    | QUESTIONS
    | REQUESTS
    | GREETINGS
    | frozenset(
        "please don't can't won't that's the this that these those there my our your their its what who".split()
    )
)
NAMES_TOO = frozenset("will may am".split())  # also names or element symbols (Will, May, Am), unless a subject follows
VERBS_TOO = frozenset("do can have".split())
SUBJECTS = frozenset(
    "i you he she it we they the a an this that these those there my your his her its our their anyone anybody "
    "someone people".split()
)
OBJECTS = frozenset("this his its yours always perhaps dishes chores exercises squats pushups sports".split())
DETERMINERS = frozenset("the a an my your his her our their this that".split())
CUT = frozenset("prof dept approx misc capt sept".split())  # abbreviations: their full stop does not end a sentence

# `i` is the pronoun after a word of BEFORE_PRONOUN, unless a word of AFTER_LETTERS follows; at the head of a
# sentence, if a word of AFTER_PRONOUN follows.
BEFORE_PRONOUN = frozenset("do can could should would shall must may".split())
AFTER_PRONOUN = frozenset("am want need have can can't don't forgot forget would think feel like live work".split())
AFTER_LETTERS = frozenset("and or in of mean stand equal rise fall flow".split())

# Names that have no other meaning in lower case and name nothing else, so that their case carries no meaning.
NAMES = frozenset(
    "france germany spain italy portugal england scotland ireland britain russia ukraine poland sweden norway "
    "belgium austria switzerland hungary canada mexico australia argentina colombia venezuela vietnam thailand egypt "
    "kenya nigeria iran iraq israel pakistan europe asia africa london paris madrid lisbon moscow tokyo seoul beijing "
    "stockholm helsinki budapest warsaw california texas florida spanish italian portuguese korean "
    "monday tuesday wednesday thursday friday saturday sunday "
    "mondays tuesdays wednesdays thursdays fridays saturdays sundays "
    "january february april june july september october november december shakespeare mozart beethoven".split()
)
