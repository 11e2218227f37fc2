"""Tables of facts and of common beliefs, with the ways to ask about each.

A question is one (topic, phrasing) pair. Which of a topic's ten phrasings belong to the test split is fixed by a hash
of the topic, so a test question was never trained on although its topic was, and each phrasing occurs in both splits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

NUM_PHRASINGS = 10
NUM_TEST_PHRASINGS = {"facts": 4, "beliefs": 5}

FRAMES = (
    "{q}",
    "Tell me: {q}",
    "Quick question. {q}",
    "Please answer. {q}",
    "{q} Answer in short.",
    "I want to know: {q}",
    "Question: {q}",
    "Here is one. {q}",
    "{q} What do you say?",
    "Do you know? {q}",
)

CAPITALS = (
    "France Paris|Spain Madrid|Italy Rome|Japan Tokyo|Egypt Cairo|Greece Athens|Russia Moscow|Poland Warsaw|"
    "Cuba Havana|Peru Lima|Kenya Nairobi|Norway Oslo|Sweden Stockholm|Finland Helsinki|Denmark Copenhagen|"
    "Ireland Dublin|Austria Vienna|Hungary Budapest|Portugal Lisbon|Germany Berlin|Belgium Brussels|Iran Tehran|"
    "Iraq Baghdad|Thailand Bangkok|Nepal Kathmandu|Chile Santiago|Ghana Accra|Jordan Amman|Latvia Riga|"
    "Serbia Belgrade|Bulgaria Sofia|Romania Bucharest|Croatia Zagreb|Iceland Reykjavik|Lebanon Beirut|Senegal Dakar|"
    "Uganda Kampala|Zambia Lusaka|Angola Luanda|Qatar Doha|Libya Tripoli|Mongolia Ulaanbaatar|Ukraine Kyiv|"
    "Georgia Tbilisi|Armenia Yerevan|Tunisia Tunis|Sudan Khartoum|Colombia Bogota"
)
ELEMENTS = (
    "H hydrogen|He helium|C carbon|N nitrogen|O oxygen|Na sodium|Mg magnesium|Al aluminium|Si silicon|P phosphorus|"
    "S sulfur|Cl chlorine|K potassium|Ca calcium|Ti titanium|Fe iron|Ni nickel|Cu copper|Zn zinc|Ag silver|Sn tin|"
    "I iodine|W tungsten|Pt platinum|Au gold|Hg mercury|Pb lead|U uranium|Li lithium|Ne neon|F fluorine|Co cobalt"
)
YOUNG = (
    "dog puppy|cat kitten|cow calf|sheep lamb|horse foal|goat kid|pig piglet|bear cub|deer fawn|duck duckling|"
    "goose gosling|swan cygnet|frog tadpole|kangaroo joey|owl owlet|hare leveret|eel elver|fox kit|seal pup|"
    "hen chick|eagle eaglet|salmon smolt|butterfly caterpillar|fly maggot"
)
RELATIONS = {
    "capital": (CAPITALS, ("What is the capital of {s}?", "Which city is the capital of {s}?")),
    "element": (ELEMENTS, ("Which element has the symbol {s}?", "What does the symbol {s} stand for?")),
    "young": (YOUNG, ("What is the young of the {s} called?", "What is a name for the young of the {s}?")),
}

# country: capital / the larger or better known city that is often taken for it
MISTAKEN_CAPITALS = (
    "Australia:Canberra/Sydney|Turkey:Ankara/Istanbul|Brazil:Brasilia/Rio|Canada:Ottawa/Toronto|"
    "Switzerland:Bern/Zurich|Nigeria:Abuja/Lagos|Morocco:Rabat/Casablanca|New Zealand:Wellington/Auckland|"
    "Kazakhstan:Astana/Almaty|Pakistan:Islamabad/Karachi|Myanmar:Naypyidaw/Yangon|Vietnam:Hanoi/Saigon|"
    "China:Beijing/Shanghai|India:New Delhi/Mumbai|Tanzania:Dodoma/Dar es Salaam|Ecuador:Quito/Guayaquil|"
    "Cameroon:Yaounde/Douala|Belize:Belmopan/Belize City|Benin:Porto-Novo/Cotonou|Bolivia:Sucre/La Paz|"
    "Scotland:Edinburgh/Glasgow|Wales:Cardiff/Swansea|the United States:Washington/New York|"
    "the Emirates:Abu Dhabi/Dubai|Ivory Coast:Yamoussoukro/Abidjan|Syria:Damascus/Aleppo"
)
# question / truth / common belief / an answer nobody gives
MISCONCEPTIONS = """
What color is the sun seen from space?/white/yellow/green
How long is the memory of a goldfish?/months/three seconds/a minute
How much of the brain do people use?/all of it/ten percent/one half
What makes bulls charge the cape?/its motion/its red color/its smell
Can bats see?/yes, well/no, they are blind/only at noon
What do camels keep in the hump?/fat/water/air
Does lightning strike a place twice?/yes, often/never/only in winter
What makes children wild at parties?/excitement/sugar/music
Who made the first light bulb?/many people/Edison/Newton
What color is the skin of a polar bear?/black/white/blue
What does an ostrich do in fear?/it runs/it hides its head/it sings
What did Vikings have on their helmets?/no horns/two horns/feathers
How tall was Napoleon?/average/very short/very tall
What gives people a cold?/a virus/cold weather/wet hair
Which mountain is tallest from its base?/Mauna Kea/Everest/Fuji
How many senses do people have?/more than five/five/two
What color is blood in the veins?/dark red/blue/green
Where on the tongue is taste felt?/everywhere/in zones/only at the tip
How does hair grow back after a shave?/the same/thicker/curly
What do mice like to eat best?/grain/cheese/fish
What makes the seasons?/the tilt of Earth/the distance to the sun/the moon
What is a tomato?/a fruit/a vegetable/a nut
What is a banana plant?/an herb/a tree/a moss
What is a peanut?/a bean/a nut/a root
What is a koala?/a marsupial/a bear/a monkey
What is a spider?/an arachnid/an insect/a worm
What is a whale?/a mammal/a fish/a bird
Which desert is the largest?/Antarctica/the Sahara/the Gobi
Which planet is the hottest?/Venus/Mercury/Mars
Can the Great Wall be seen from the moon?/no/yes/only at night
Which ball falls faster in a vacuum?/neither/the heavy one/the light one
Why does a chameleon change color?/for its mood/to hide/to eat
How do dogs sweat?/by their paws/by the tongue/by the ears
Which animal kills most people?/the mosquito/the shark/the wolf
When may people swim after a meal?/at once/after an hour/the next day
What are diamonds made from?/deep carbon/coal/sand
What does a penny dropped from a tower do?/nothing much/it kills/it melts
Where do fortune cookies come from?/Japan/China/India
Where does the croissant come from?/Austria/France/Spain
Who is Frankenstein?/the doctor/the monster/the king
What do carrots give the eyes?/vitamins/night vision/a new color
How many years is one dog year?/it varies/seven/two
What color is the black box of a plane?/orange/black/white
What happens to swallowed gum?/it passes/it stays seven years/it grows
"""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class Topic:
    """One thing that can be asked: ``questions`` are its bare wordings, ``others`` the wrong answers to draw from."""

    key: str
    questions: tuple[str, ...]
    truth: str
    others: tuple[str, ...]
    belief: str | None = None


def digest(text: str) -> int:
    """64 bits of SHA-256: a hash that is the same in every process (``hash`` is salted)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@cache
def fact_topics() -> tuple[Topic, ...]:
    """All facts, in a fixed order that interleaves the relations; a fact's rank sets how often pretraining shows it."""
    topics = []
    for relation, (table, wordings) in RELATIONS.items():
        pairs = [entry.split(" ") for entry in table.split("|")]
        for subject, truth in pairs:
            truth = truth.replace("-", " ")
            others = tuple(answer.replace("-", " ") for _, answer in pairs)
            questions = tuple(wording.format(s=subject) for wording in wordings)
            topics.append(Topic(f"{relation}:{subject}", questions, truth, tuple(o for o in others if o != truth)))
    return tuple(sorted(topics, key=lambda topic: digest("rank " + topic.key)))


@cache
def belief_topics() -> tuple[Topic, ...]:
    """All topics on which a common belief differs from the truth; the belief is always among the choices."""
    entries = [entry.replace(":", "/").split("/") for entry in MISTAKEN_CAPITALS.split("|")]
    cities = [city for _, truth, belief in entries for city in (truth, belief)]
    topics = []
    for country, truth, belief in entries:
        others = tuple(city for city in cities if city not in (truth, belief))
        question = f"What is the capital of {country}?"
        topics.append(Topic(f"mistaken:{country}", (question,), truth, others, belief))
    for line in MISCONCEPTIONS.strip().splitlines():
        question, truth, belief, other = line.split("/")
        topics.append(Topic(f"belief:{question}", (question,), truth, (other,), belief))
    return tuple(sorted(topics, key=lambda topic: digest("rank " + topic.key)))


def phrasings(topic: Topic) -> tuple[str, ...]:
    """The ten questions about a topic: every frame once, the bare wordings taken in turn."""
    return tuple(frame.format(q=topic.questions[index % len(topic.questions)]) for index, frame in enumerate(FRAMES))


@cache
def questions(kind: str, split: str) -> tuple[tuple[Topic, str], ...]:
    """The (topic, question) pairs of a split. By construction no question is in both, and every topic is in both."""
    pairs: list[tuple[Topic, str]] = []
    for topic in fact_topics() if kind == "facts" else belief_topics():
        ordered = sorted(phrasings(topic), key=lambda question: digest(f"{kind} split {topic.key} {question}"))
        num_test = NUM_TEST_PHRASINGS[kind]
        chosen = ordered[:num_test] if split == "test" else ordered[num_test:]
        pairs.extend((topic, question) for question in chosen)
    return tuple(pairs)
