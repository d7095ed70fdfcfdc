"""Pairs of a request and a description of what it asks for, made from the
templates below and the subjects of subjects.py. The teacher is not asked about
them: they tell the table what it does not know, which is that in a request the
thing counts, and neither the place, nor for whom it is, nor the politeness.
General knowledge, from no data set and no tool's description.
"""

import subjects

# {x}: a thing or two; {l}: where; {p}: for whom.
WANTED = """
Can you help me with {x}?
Could you please find {x} for me?
I'm looking for {x}.
I need {x} for {p}.
I would like to know more about {x}. Can you tell me where to start?
Hi, I want {x} in {l}. What do you recommend?
Please give me all the information about {x} that you have.
What are the best options for {x} right now?
My friend and I are going to {l} and we would like to have {x}.
I have been searching everywhere for {x}, but I can't find anything!
Is there something that gives me {x}? It is for {p}.
I'm so confused. How does {x} work?
Show me the latest {x}, and thank you very much.
I am planning something for {p} and need suggestions about {x}.
Tell me about {x} in {l}, please.
How can I get {x} quickly and easily?
Hey! I was wondering whether you know a good {x}.
We live in {l} and are interested in {x}. Could you provide me with a list?
I'm curious: what is new about {x} this week?
I am a big fan of {x} and want to learn more about it.
Can you suggest some {x} for {p}? I'd be glad of your advice.
What {x} would you choose if you were in {l}?
{x}
Fetch the details of {x} for {p}.
Do you have any recommendations or suggestions about {x}?
""".strip().split("\n")

# {v}: what is to be done.
TO_DO = """
I want to {v}. Can you help me?
How can I {v} in {l}?
I need to {v} for {p}. What should I do?
Is there an easy way to {v}?
Help me {v}, please.
I'm having a hard time and would like to {v}. Any suggestions?
Could you tell me the best way to {v} when I am in {l}?
What do I need in order to {v}?
My boss has asked me to {v}, where do I begin?
I have never tried to {v} before. Can you assist me?
""".strip().split("\n")

# {n}, {m}, {k}: things of one subject; {v}, {w}: what is done with them.
DESCRIBED = """
get {n} by {m}
{n} search
Search {n} and {m}.
Get {n} details
Returns a list of {n} with {m}.
Your assistant for {n}: {v}, get {m} and more.
Discover {n} and {m}.
An API that provides {n} and {m} information.
{v} easily. Find {n} and {m} personalized for you.
Helps users to {v}.
Provides {n}, {m} and {k}.
Everything about {n}, {m} and {k}: {v} and {w}.
Ask about {n}. Lets you {v}.
{n} tool: {m}, {k}.
""".strip().split("\n")

BEFORE = ["", "I live in {l}. ", "It is about {p}. "]


def places(wordnet_folder):
    """WordNet's places that have a name: those of its file 15, `noun.location`."""
    with open(wordnet_folder / "data.noun", encoding="ascii") as lines:
        for line in lines:
            fields = line.split(" ")
            if not line.startswith("  ") and fields[1] == "15":
                name = fields[4].replace("_", " ")
                if name[0].isupper() and len(name) < 24:
                    yield name


def asked(wordnet_folder, dice, count):
    """[(request, description, subject by number)]"""
    # Places that people write about are few; a third of the draws have those.
    where = list(places(wordnet_folder))
    where += subjects.PLACES * (len(where) // len(subjects.PLACES) // 2)
    known = list(subjects.subjects())
    for _ in range(count):
        subject = dice.randrange(len(known))
        things, doings = known[subject]
        n, m, k = dice.sample(things, 3)
        v, w = dice.sample(doings, 2)
        around = {"l": dice.choice(where), "p": dice.choice(subjects.PEOPLE)}
        if dice.random() < 0.35:
            request = dice.choice(TO_DO).format(v=v, **around)
        else:
            request = dice.choice(WANTED).format(x=dice.choice([n, n, f"{m} and {n}"]), **around)
        if dice.random() < 0.2:
            request = dice.choice(BEFORE).format(**around) + request
        yield request, dice.choice(DESCRIBED).format(n=n, m=m, k=k, v=v, w=w), subject
