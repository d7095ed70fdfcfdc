"""What people ask services for, written down by hand for the templates in
corpus.py: a subject a line, its things before the bar, what is done with them
after it. General knowledge, from no data set and no tool's description.
"""

SUBJECTS = """
weather forecast, temperature, humidity, storm warning, air quality, pollen count, UV index, wind speed, rainfall, snow report | check the weather, compare the climate, know whether it will rain
flight, airline ticket, airport, boarding pass, layover, departure time, airfare, seat, baggage allowance | book a flight, track a plane, find cheap flights
hotel, hostel, vacation rental, room rate, check-in, resort, apartment for a holiday, bed and breakfast | book a room, compare accommodation, find a place to stay
trip, itinerary, destination, travel guide, sightseeing tour, landmark, visa requirement, passport, tourist attraction | plan a trip, explore a city, pack for a journey
train, bus route, subway, public transport, timetable, ferry, commute, station, transit fare | get from one place to another, find the next train
map, directions, coordinates, latitude and longitude, distance, postal code, address, geocoding, time zone, nearby places | find the shortest route, look up an address, locate a place
car, used vehicle, dealer, VIN, license plate, car rental, mileage, electric car, charging station, fuel price | buy a car, rent a vehicle, compare models
restaurant, menu, table reservation, food delivery, cuisine, takeaway, cafe, reviews of a restaurant | order food, reserve a table, find somewhere to eat
recipe, ingredient, dinner, vegetarian dish, cake, cooking time, meal plan, cocktail, wine pairing | cook a meal, bake bread, use up leftovers
nutrition, calories, diet, protein, vitamins, allergy, food label, weight loss | count calories, eat healthier, lose weight
workout, exercise, fitness plan, muscle, running, yoga, heart rate, BMI, steps | get fit, train for a marathon, track a workout
doctor, symptoms, disease, medication, drug interaction, hospital, vaccine, mental health, therapy, clinical trial | find a specialist, understand a diagnosis
stock price, share, dividend, earnings report, ticker, market index, portfolio, ETF, balance sheet, analyst rating | invest money, analyze a company, trade shares
cryptocurrency, bitcoin, ethereum, token, blockchain, wallet, NFT, smart contract, transaction hash, gas fee, exchange rate of coins | trade crypto, look up a transaction, track a wallet
currency, exchange rate, dollar, euro, conversion, inflation, interest rate, central bank, GDP, economic indicator | convert money, compare economies
bank account, payment, invoice, credit card, loan, mortgage, refund, IBAN, subscription, tax return | pay a bill, calculate a mortgage, send an invoice, file taxes
insurance, policy, premium, claim, retirement, pension, budget, savings, expense report | save money, track expenses, plan a budget
job, resume, cover letter, salary, interview, recruiter, vacancy, career, freelance work, employer | find a job, prepare for an interview, hire staff
real estate, house, apartment, rent, property listing, home value, landlord, neighborhood, floor plan | buy a house, find an apartment, estimate the value of a home
shopping, product, price comparison, discount, coupon, deal, online store, barcode, best seller, gift, warranty | find the lowest price, buy a present, return a product
fashion, clothes, dress, shoes, outfit, jewelry, size chart, brand, cosmetics, skin care, perfume | choose an outfit, find a style
delivery, package, tracking number, shipment, courier, shipping cost, customs, freight | track a parcel, ship goods
order, customer, warehouse, stock level, supplier, purchase order, catalog, SKU, return | check an order, restock goods, manage inventory
football match, basketball team, league table, player statistics, fixture, score, tournament, coach, transfer, referee | follow a team, see live scores
tennis, golf, Formula 1 race, Olympics, boxing, cricket, baseball, hockey, cycling, betting odds | predict a result, get race results
movie, film, actor, director, trailer, cinema, streaming service, TV show, episode, cast, box office | watch a movie, find something to stream
song, album, artist, lyrics, playlist, concert, music genre, chart, band, podcast, radio station, chords | listen to music, discover new artists
book, author, novel, library, ISBN, publisher, quote, poem, short story, chapter, bestseller | read a book, write a story, find a quote
video game, console, player, leaderboard, level, multiplayer server, esports, game character, chess, puzzle, card game, trivia | play a game, solve a puzzle, improve my rank
anime, manga, comic, superhero, cartoon, wallpaper, meme, joke, fun fact, riddle, horoscope, zodiac sign, tarot | cheer somebody up, tell a joke
news, headline, article, newspaper, journalist, press release, breaking story, politics, election, opinion poll | read the news, follow current events
law, legislation, court case, contract, patent, lawyer, legal advice, regulation, trademark, government, senator | understand a law, review a contract
school, course, lesson, teacher, student, homework, exam, university, scholarship, curriculum, tutor, flashcards, quiz | learn a subject, study for an exam
mathematics, equation, calculation, statistics, geometry, graph of a function, matrix, probability, unit conversion | solve an equation, compute an average, plot a function
science paper, research, citation, abstract, journal, experiment, literature review, arXiv preprint, biology, chemistry, physics | find papers, cite a source
language, translation, dictionary, synonym, grammar, pronunciation, vocabulary, spelling, accent, transliteration | translate a text, learn a language, check my grammar
text, summary, essay, blog post, copywriting, headline for an ad, tone, paragraph, rewriting, plagiarism, sentiment | summarize an article, improve my writing
email, inbox, attachment, newsletter, spam, mailing list, disposable address, email validation, subject line | send an email, verify an address
message, chat, SMS, phone number, notification, contact, group chat, bot, voice call, carrier lookup | send a text message, validate a phone number
calendar, meeting, appointment, event, reminder, schedule, deadline, holiday, availability, time slot | schedule a meeting, set a reminder, invite guests
task, project, ticket, issue, sprint, board, milestone, team, comment, backlog, note, to-do list | manage a project, assign a task, close a ticket
social media, post, hashtag, follower, profile, influencer, tweet, story, comment, trend, username, feed | grow an audience, analyze a profile, schedule a post
video, channel, subtitle, transcript, clip, thumbnail, live stream, playlist of videos, captions, viewers | download a video, edit a clip, get a transcript
photo, image, logo, icon, drawing, background removal, face recognition, color palette, watermark, QR code, screenshot | generate an image, edit a picture, compress a photo
design, template, poster, presentation, slide, font, website layout, illustration, mockup, interior design, 3D model | design a logo, create slides, decorate a room
document, PDF, spreadsheet, chart, form, signature, scan, table, file format, page, diagram, mind map | convert a file, extract text from a PDF, make a chart
website, domain name, DNS record, SSL certificate, hosting, URL, link, web page, uptime, page speed, crawler | scrape a page, shorten a link, check a domain
search engine, keyword, backlink, ranking, SEO, traffic, advertising campaign, landing page, conversion, click, audience | improve a ranking, research keywords, run an ad
company, startup, competitor, industry, lead, sales pipeline, CRM, contact details, revenue, employees, funding, business plan | research a company, find leads, analyze a market
software, source code, repository, pull request, bug, API, library, programming language, commit, unit test, deployment | debug code, review a change, deploy an application
database, query, SQL, table, record, schema, backup, index, JSON, CSV, data set, key-value store | query data, validate JSON, clean a data set
server, cloud, container, virtual machine, log, monitoring, alert, metric, network, IP address, proxy, bandwidth | monitor a server, look up an IP address, restart a service
password, encryption, hash, token, authentication, user account, permission, vulnerability, malware, VPN, fraud, identity | check whether a password leaked, scan for malware, sign in
artificial intelligence, chatbot, prompt, language model, speech recognition, text to speech, embedding, classification, voice | ask an AI, generate text, transcribe speech
random number, UUID, fake data, test user, placeholder, date, timestamp, calendar week, barcode image, string | generate test data, format a date
animal, dog, cat, breed, pet food, veterinarian, bird, fish, plant, flower, garden, insect | adopt a pet, identify a plant, care for a garden
history, country, population, capital city, flag, culture, religion, Bible verse, prayer, philosophy, museum, art | learn about a culture, visit a museum
space, planet, astronaut, satellite, moon phase, star, asteroid, telescope, sunrise, earthquake, tide, climate change, carbon footprint | look at the night sky, reduce emissions
energy, electricity, solar panel, smart home, sensor, light bulb, thermostat, device, battery, Internet of Things | turn on the lights, save energy
wedding, birthday party, gift idea, family, baby name, dating, relationship, friend, children, kids activity, genealogy | plan a party, choose a name, meet people
event, ticket, festival, concert venue, conference, theater, exhibition, sports game seat, nightlife | buy tickets, find events nearby
home repair, furniture, plumber, cleaning, tool, recycling, moving, paint, craft, sewing, do-it-yourself | fix something, renovate a kitchen
charity, volunteer, nonprofit, donation, community, survey, feedback, review, rating, opinion | donate money, collect feedback, conduct a survey
personality, habit, meditation, sleep, motivation, advice, goal, productivity, decision, mood, journal | relax, build a habit, make a decision
"""

PEOPLE = """my family|a friend|my company|my boss|a client|my students|our team|my website|a school project|my grandmother|my research|my blog|the weekend|next month|tomorrow|a beginner|my small business|an upcoming event""".split(
    "|"
)

PLACES = """Paris|New York|Tokyo|London|Berlin|California|India|Brazil|the United States|Canada|Sydney|Mexico|Chicago|Italy|Seoul|Lagos|Toronto|Spain""".split(
    "|"
)

# {n}, {m}: things of one subject; {o}: of another; {v}: what is done; {p}:
# for whom; {l}: where.
REQUESTS = """
I want to {v}. Can you help me?
I need to {v} for {p}. Please find the {n} and the {m}.
Can you give me the {n} in {l}?
I'm planning something for {p} and I need the {n}. Also, tell me about the {o}.
What is the {n} of this {m}?
How can I {v} in {l}?
Could you recommend a good {n} for {p}? It would be great to have the {m} too.
Please provide me with the latest {n} and {m}, and suggest a {o}.
My friend is interested in {n}. Fetch the details and a list of {m}.
I'm curious about {n}. What are the most popular {m} right now?
Is there an easy way to {v}?
I have a {n} and would like to know its {m}.
Show me all {n} related to {m}.
I'm writing about {n} for {p}, can you look up {m} and {o}?
Help me {v} and {w}.
What's the best {n} near {l}?
Compare the {n} of {l} with that of {k}.
Give me ideas for {n}.
Tell me everything about {n}, including its {m}.
We are organizing something for {p}: first {v}, then get the {o}.
I lost my {n}. How do I find the {m}?
Why is my {n} so different from the {m}?
""".strip().split("\n")

DESCRIPTIONS = """
get {n} by {m}
{n} search
search {n} and {m}
Get {n} details
list all {n}
Retrieve the {n} for a given {m}.
Returns a list of {n} with {m}.
This endpoint returns {n} by {m} id.
Lets users {v} with real-time {n} data.
Your assistant for {n}: {v}, get {m} and more.
Create a new {n}
Update the {m} of a {n}
delete {n}
Discover {n}, {m} and {o} in {l}.
An API that provides {n}, {m} and {o} information.
{v} easily. Find {n} and {m} personalized for you.
Search {n} by name, {m} or keyword, with pagination.
get{N}By{M}
""".strip().split("\n")


def subjects():
    """[(things, doings)]"""
    for line in SUBJECTS.strip().split("\n"):
        things, doings = line.split(" | ")
        yield things.split(", "), doings.split(", ")
