"""The texts that the table is trained on, and nothing else.

Two sources, both free to use in this way, and both named in NOTICE:
WordNet 3.0 (Debian's `wordnet-base`) and the descriptions of Debian's own
packages (`Translation-en`). Requests and short descriptions are templates of
ours, filled with words of WordNet and of subjects.py. No text of any
evaluation is read here, and no tool's.
"""

import random
import re

import subjects

# What people say around what they want, whatever it is. The blanks are filled from WordNet:
# {n} and {m} are nouns, {v} is a verb's gloss, {g} a noun's gloss.
REQUESTS = [
    "Can you help me find {n}?",
    "Can you {v} for me?",
    "I want to {v}.",
    "I need to {v}, how can I do that?",
    "I'm looking for {n} and {m}.",
    "What is the best {n} for {m}?",
    "Please give me information about {n}.",
    "How do I {v}?",
    "Could you tell me more about {n}? I also need {m}.",
    "Show me the latest {n} about {m}.",
    "I'm planning {n} and would like to know about {m}.",
    "Is there a tool to {v}?",
    "Where can I buy {n}?",
    "Recommend me {n} that goes well with {m}.",
    "Explain {n} to me, please.",
    "I have a question about {n}: what does it have to do with {m}?",
    "List all {n} of this {m}.",
    "Create {n} from my {m}.",
    "Fetch the {n} by {m}.",
    "Get {n} details",
    "Search for {n}",
    "Update the {n} of a {m}",
    "What's the current {n} of {m}?",
    "My friend told me about {n}. Can you look up {m}?",
    "I'm a fan of {n}, and I want to {v}.",
    "Suggest some {n} for my {m}, and tell me how to {v}.",
    "I'd like something that is {g}.",
    "Write me {n} on the topic of {m}.",
    "Calculate the {n} for {m}.",
    "Convert {n} to {m}.",
]


def wordnet(folder):
    """(lemma, gloss, examples, part of speech) of every synset, in order."""
    for part in ("noun", "verb", "adj", "adv"):
        with open(folder / f"data.{part}", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("  "):
                    continue  # the licence
                fields, _, gloss = line.partition(" | ")
                fields = fields.split(" ")
                count = int(fields[3], 16)
                lemmas = [fields[4 + 2 * i].split("(")[0].replace("_", " ") for i in range(count)]
                examples = re.findall(r'"([^"]+)"', gloss)
                gloss = re.split(r'[;:,]?\s*"', gloss)[0].strip(" ;\n")
                if gloss:
                    yield lemmas, gloss, examples, part


def used_senses(folder):
    """{(lemma, part)} of the senses that WordNet's own tagged corpus has."""
    parts = {"1": "noun", "2": "verb", "3": "adj", "5": "adj", "4": "adv"}
    with open(folder / "cntlist.rev", encoding="ascii") as lines:
        for line in lines:
            lemma, _, sense = line.split(" ")[0].partition("%")
            yield lemma.replace("_", " "), parts[sense[0]]


def debian(text):
    """(name, short, first paragraph) of every package, sorted by name."""
    found = {}
    for stanza in text.split("\n\n"):
        name = re.search(r"^Package: (.+)$", stanza, re.M)
        words = re.search(r"^Description-en: (.+)\n((?: .*\n?)*)", stanza, re.M)
        if not (name and words):
            continue
        lines = []
        for line in words[2].splitlines():
            if line.strip() in ("", "."):
                break
            lines.append(line.strip())
        found[name[1]] = (words[1].strip(), " ".join(lines)[:400])
    # One of each family: a library's packages say the same thing many times.
    seen = set()
    for name in sorted(found):
        short, long = found[name]
        if long and long not in seen and not re.search(r"-(dbg|dbgsym|l10n|locale)$", name):
            seen.add(long)
            yield name, short, long


def build(wordnet_folder, debian_text, size, seed):
    """`size` texts without repetition, and pairs of places of two that mean
    the same: [(text, text)] by index."""
    dice = random.Random(seed)
    synsets = list(wordnet(wordnet_folder))
    packages = list(debian(debian_text))
    dice.shuffle(synsets)
    dice.shuffle(packages)

    # Words in use come first; the stable sort keeps the shuffled order.
    used = set(used_senses(wordnet_folder))
    synsets.sort(key=lambda synset: (synset[0][0], synset[3]) not in used)

    texts, pairs, place = [], [], {}

    def add(text):
        if text not in place:
            place[text] = len(texts)
            texts.append(text)
        return place[text]

    # Shares of the whole, in texts.
    for lemmas, gloss, _, _ in synsets:
        if len(texts) >= size * 0.15:
            break
        pairs.append((add(", ".join(lemmas)), add(gloss)))
    for _, _, examples, _ in synsets:
        if len(texts) >= size * 0.22:
            break
        for example in examples[:1]:
            add(example)
    for name, short, long in packages:
        if len(texts) >= size * 0.50:
            break
        pairs.append((add(f"{name.replace('-', ' ')}: {short}"), add(long)))

    nouns = [l[0] for l, _, _, p in synsets if p == "noun" and (l[0], p) in used and l[0].islower()]
    phrases = [
        (g, p) for l, g, _, p in synsets if (l[0], p) in used and len(g) < 60 and "(" not in g
    ]
    verbs = [g for g, p in phrases if p == "verb"]
    glosses = [g for g, p in phrases if p == "noun"]
    while len(texts) < size * 0.60:
        request = dice.choice(REQUESTS)
        if dice.random() < 0.3:
            request += " " + dice.choice(REQUESTS)
        blanks = {"n": nouns, "m": nouns, "v": verbs, "g": glosses}
        add(request.format(**{blank: dice.choice(words) for blank, words in blanks.items()}))

    known = list(subjects.subjects())
    while len(texts) < size:
        add(told(dice, known))
    return texts, pairs


def told(dice, known):
    """A request or a description from the templates of subjects.py."""
    things, doings = dice.choice(known)
    n, m = dice.sample(things, 2)
    o = dice.choice(dice.choice(known)[0])
    v, w = dice.sample(doings, 2)
    l, k = dice.sample(subjects.PLACES, 2)
    camel = lambda words: "".join(word.capitalize() for word in words.split())
    if dice.random() < 0.35:
        template = dice.choice(subjects.DESCRIPTIONS)
    else:
        template = dice.choice(subjects.REQUESTS)
        if dice.random() < 0.3:
            template += " " + dice.choice(subjects.REQUESTS)
    blanks = dict(n=n, m=m, o=o, v=v, w=w, l=l, k=k, p=dice.choice(subjects.PEOPLE))
    return template.format(N=camel(n), M=camel(m), **blanks)
