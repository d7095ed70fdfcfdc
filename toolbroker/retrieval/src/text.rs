//! From text to terms: identifiers taken apart, stop words dropped, stems.
//!
//! Any text is fine. What is neither letter nor digit separates, so control
//! characters and markup vanish; a word is cut at [`WORD_CHARS_MAX`].

use std::borrow::Cow;

use rust_stemmers::{Algorithm, Stemmer};

/// A longer word is no word of any language: only its beginning counts.
const WORD_CHARS_MAX: usize = 40;

/// A line that goes on in the next without an end of a sentence is wrapped, if it is long.
const WRAPPED_BYTES: usize = 50;
/// What stands between two things to be done.
const JOINTS: [&str; 6] = [", and then ", " and then ", ", then ", " then ", ", and ", " and "];
/// A sentence of more words tells a story, in which these join anything.
const JOINED_WORDS_MAX: usize = 30;

/// What is sent, and sends by its own name: `email Tom`, `mail it to the team`.
const SENT: [&str; 5] = ["email", "e-mail", "mail", "message", "text"];
/// What begins what is sent or whom it is sent to, beside a name.
const RECIPIENTS: [&str; 22] = [
    "a",
    "all",
    "an",
    "each",
    "every",
    "everybody",
    "everyone",
    "her",
    "him",
    "it",
    "me",
    "my",
    "our",
    "that",
    "the",
    "their",
    "them",
    "these",
    "this",
    "those",
    "us",
    "your",
];

/// What is before the path of an operation, whose words say what that does.
const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];
/// A label of a host's name that is no longer, and has another before it, is its country's.
const SECOND_LEVEL_CHARS_MAX: usize = 3;
/// A longer ending of a file's name is none.
const ENDING_CHARS_MAX: usize = 8;

/// Words that say how something is asked for, never what. Sorted.
const STOP_WORDS: &[&str] = &[
    "a", "about", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by",
    "can", "could", "did", "do", "does", "for", "from", "had", "has", "have", "he", "help", "her",
    "his", "how", "i", "if", "in", "into", "is", "it", "its", "just", "like", "ll", "m", "me",
    "my", "need", "of", "on", "or", "our", "please", "re", "s", "she", "should", "so", "some", "t",
    "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those",
    "to", "us", "ve", "want", "was", "we", "were", "what", "when", "where", "which", "who", "will",
    "with", "would", "you", "your",
];

/// The words of a text in lower case, identifiers taken apart: `getStock2` is
/// `get`, `stock`, `2`.
pub(crate) fn words(text: &str, mut each: impl FnMut(&str)) {
    let mut word = String::new();
    let mut chars = 0;
    let mut before = Shape::Other;
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let shape = Shape::of(c);
        let begins = match (before, shape) {
            (_, Shape::Other) | (Shape::Other, _) => true,
            // `getStock`; and `HTTPServer` is `http`, `server`.
            (Shape::Lower, Shape::Upper) => true,
            (Shape::Upper, Shape::Upper) => {
                rest.peek().is_some_and(|next| Shape::of(*next) == Shape::Lower)
            }
            (Shape::Digit, after) => after != Shape::Digit,
            (_, Shape::Digit) => true,
            (_, Shape::Lower) => false,
        };
        if begins && !word.is_empty() {
            each(&word);
            word.clear();
            chars = 0;
        }
        if shape != Shape::Other && chars < WORD_CHARS_MAX {
            word.extend(c.to_lowercase());
            chars += 1;
        }
        before = shape;
    }
    if !word.is_empty() {
        each(&word);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Lower,
    Upper,
    Digit,
    Other,
}

impl Shape {
    fn of(c: char) -> Self {
        match c {
            'a'..='z' => Self::Lower,
            'A'..='Z' => Self::Upper,
            '0'..='9' => Self::Digit,
            c if c.is_ascii() => Self::Other,
            c if c.is_uppercase() => Self::Upper,
            c if c.is_alphanumeric() => Self::Lower,
            _ => Self::Other,
        }
    }
}

/// Whether a word (in lower case) carries nothing.
pub(crate) fn is_stop_word(word: &str) -> bool {
    STOP_WORDS.binary_search(&word).is_ok()
}

/// The stem of a word in lower case.
pub(crate) fn stem(word: &str) -> String {
    Stemmer::create(Algorithm::English).stem(word).into_owned()
}

/// An intent in which messages are sent by that word, as descriptions have it: `email Tom` is
/// `send email Tom`, where the rest of the intent may be of addresses and of mailboxes.
pub(crate) fn with_sending(intent: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let (mut kept, mut before) = (0, "");
    let mut words = intent.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let is = |word: &str, of: &[&str]| of.iter().any(|it| word.eq_ignore_ascii_case(it));
        // What is told to do something stands first, or behind one of these.
        let is_told = before.is_empty()
            || before.ends_with([',', '.', ';', ':', '!', '?'])
            || is(before, &["and", "then", "or", "to", "please"]);
        let is_to = |next: &&str| {
            next.starts_with(char::is_uppercase) || is(next.trim_end_matches(','), &RECIPIENTS)
        };
        if is(word, &SENT) && is_told && words.peek().is_some_and(is_to) {
            let begins = word.as_ptr().addr() - intent.as_ptr().addr();
            out.push_str(&intent[kept..begins]);
            out.push_str("send ");
            kept = begins;
        }
        before = word;
    }
    if out.is_empty() {
        return Cow::Borrowed(intent);
    }
    out.push_str(&intent[kept..]);
    Cow::Owned(out)
}

/// An intent that names kinds of things in the place of addresses and files: the words in
/// these are of somebody's pages and folders, and say nothing of what a tool is to do.
pub(crate) fn by_kind(intent: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let (mut kept, mut before) = (0, "");
    for word in intent.split_whitespace() {
        let is_mark = |c: char| "\"'`()<>[],;:!?".contains(c);
        let bare = word.trim_start_matches(is_mark);
        let bare = bare.trim_end_matches(|c: char| c == '.' || is_mark(c));
        if let Some(kind) = kind_of(bare, before) {
            let begins = bare.as_ptr().addr() - intent.as_ptr().addr();
            out.push_str(&intent[kept..begins]);
            out.push_str(&kind);
            kept = begins + bare.len();
        }
        before = bare;
    }
    if kept == 0 {
        return Cow::Borrowed(intent);
    }
    out.push_str(&intent[kept..]);
    Cow::Owned(out)
}

/// What an address or a path is.
fn kind_of(word: &str, before: &str) -> Option<Cow<'static, str>> {
    let is_scheme = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric());
    let address = match word.split_once("://") {
        Some((scheme, rest)) => is_scheme(scheme).then_some(rest),
        None => word.starts_with("www.").then_some(word),
    };
    if let Some(address) = address.filter(|it| !it.is_empty()) {
        return Some(match site_of(address) {
            Some(site) => format!("{site} URL").into(),
            None => "URL".into(),
        });
    }
    let drive = word.get(1..3).filter(|_| word.starts_with(|c: char| c.is_ascii_alphabetic()));
    let is_rooted = ["/", "~/", "./", "../"].iter().any(|root| word.starts_with(root))
        && !METHODS.contains(&before)
        && !word.contains(['{', '}'])
        || matches!(drive, Some(":\\" | ":/"));
    let name = word.rsplit(['/', '\\']).next().unwrap_or_default();
    let ending = name.rsplit_once('.').map(|(_, ending)| ending).filter(|ending| {
        let is_one = ending.chars().all(|c| c.is_ascii_alphanumeric());
        ending.len() <= ENDING_CHARS_MAX && is_one && ending.contains(char::is_alphabetic)
    });
    match ending {
        Some(ending) if is_rooted || name.len() < word.len() => {
            Some(format!("{ending} file").into())
        }
        _ if is_rooted && word.contains(char::is_alphabetic) => Some("path".into()),
        _ => None,
    }
}

/// Whose an address is, in the word that people call it by (`youtube`). Tools say which
/// sites they are for.
fn site_of(address: &str) -> Option<&str> {
    let host = address.split(['/', ':', '?', '#']).next().unwrap_or_default();
    let (name, _) = host.rsplit_once('.')?;
    let mut labels = name.rsplit('.');
    let last = labels.next().unwrap_or(name);
    // As in `example.co.uk`.
    let site = labels.next().filter(|_| last.len() <= SECOND_LEVEL_CHARS_MAX).unwrap_or(last);
    (site != "example" && site.contains(char::is_alphabetic)).then_some(site)
}

/// A sentence of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sentence<'a> {
    pub(crate) text: &'a str,
    /// Whether it is a line of a list: of what is to be done, each is a step.
    pub(crate) is_line: bool,
}

/// The sentences of a text: at most `most`, the last has the rest. What is no word is none.
/// A line of a list is one, whatever it has in it.
pub(crate) fn sentences(text: &str, most: usize) -> Vec<Sentence<'_>> {
    let mut found: Vec<Sentence<'_>> = Vec::new();
    let several = text.lines().filter(|line| says_something(line)).count() > 1;
    let mut before = "";
    for line in text.lines().filter(|line| says_something(line)) {
        let item = without_mark(line.trim());
        let own = of_line(item.unwrap_or(line));
        // What was wrapped at some column is no list.
        let is_wrapped = before.len() >= WRAPPED_BYTES
            && !before.ends_with(['.', '!', '?', ';', ':'])
            && line.starts_with(char::is_lowercase);
        match item {
            Some(item) => found.push(Sentence { text: item, is_line: several }),
            None => {
                let is_line = several && own.len() == 1 && !is_wrapped;
                found.extend(own.into_iter().map(|text| Sentence { text, is_line }));
            }
        }
        before = line.trim();
    }
    if found.len() > most
        && let Some(last) = found[..most].last_mut()
    {
        let begins = last.text.as_ptr().addr() - text.as_ptr().addr();
        *last = Sentence { text: text[begins..].trim(), is_line: false };
    }
    found.truncate(most);
    found
}

fn says_something(text: &str) -> bool {
    text.contains(char::is_alphabetic)
}

/// The item of a list behind its mark (`-`, `*`, `1.`, `a)`), if it has one.
fn without_mark(line: &str) -> Option<&str> {
    let (mark, item) = line.split_once(char::is_whitespace)?;
    let is_numbered = || {
        let number = mark.strip_suffix(['.', ')'])?.trim_start_matches('(');
        let is_letter = number.len() == 1 && number.bytes().all(|it| it.is_ascii_alphabetic());
        let is_number =
            (1..=3).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
        (is_letter || is_number).then_some(())
    };
    let is_mark = matches!(mark, "-" | "*" | "+" | "•") || is_numbered().is_some();
    is_mark.then(|| item.trim())
}

/// The sentences of one line.
fn of_line(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = line;
    // `3.5` and `e.g.x` are no ends.
    let end = |text: &str| {
        text.char_indices().find_map(|(at, c)| {
            let next = text[at + c.len_utf8()..].chars().next();
            let ends = matches!(c, '.' | '!' | '?' | ';') && next.is_none_or(char::is_whitespace);
            ends.then_some(at + 1)
        })
    };
    while !rest.is_empty() {
        let (sentence, more) = rest.split_at(end(rest).unwrap_or(rest.len()));
        found.extend(Some(sentence.trim()).filter(|it| says_something(it)));
        rest = more;
    }
    found
}

/// The steps of a request: its sentences, at most `most`; or of a single short one those
/// that it joins.
pub(crate) fn steps(text: &str, most: usize) -> Vec<Sentence<'_>> {
    let sentences = sentences(text, most);
    match sentences.as_slice() {
        [only] if only.text.split_whitespace().count() <= JOINED_WORDS_MAX => {
            joined(only.text, most)
        }
        _ => sentences,
    }
}

/// The parts of a sentence, where on both sides of what joins them enough is said for a
/// thing to be done: `bread and butter` is one.
fn joined(sentence: &str, most: usize) -> Vec<Sentence<'_>> {
    let says_enough = |text: &str| {
        let mut telling = 0;
        words(text, |word| telling += usize::from(!is_stop_word(word)));
        telling >= 2
    };
    let mut found = Vec::new();
    let (mut start, mut at) = (0, 0);
    loop {
        let joint = |joint: &&str| {
            let from = at + sentence[at..].find(*joint)?;
            Some((from, from + joint.len()))
        };
        // The first, and of those that begin there the longest.
        let first =
            JOINTS.iter().filter_map(joint).min_by_key(|(from, to)| (*from, usize::MAX - to));
        let Some((from, to)) = first else { break };
        at = to;
        let parts = (&sentence[start..from], &sentence[to..]);
        if found.len() + 1 < most && says_enough(parts.0) && says_enough(parts.1) {
            found.push(Sentence { text: parts.0.trim(), is_line: true });
            start = to;
        }
    }
    found.push(Sentence { text: sentence[start..].trim(), is_line: true });
    found
}

/// `text`, cut at a character boundary to `bytes_max` bytes.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_files_are_read_as_what_they_are() {
        for (intent, kinds) in [
            ("open https://news.ycombinator.com/x?a=git.", "open ycombinator URL."),
            ("go to (https://example.com), then www.github.com", "go to (URL), then github URL"),
            ("http://localhost:9876/index.html", "URL"),
            ("list /var/log\nread '~/git/log.txt'!", "list path\nread 'txt file'!"),
            ("move ./a/b.md to ../c", "move md file to path"),
            (r"write C:\Users\me\out.json", "write json file"),
            ("query data/test.sqlite", "query sqlite file"),
            ("read 'data/a.txt'. Open \"~/b\".", "read 'txt file'. Open \"path\"."),
            ("go to https://shop.example.co.uk and https://www.bbc.co.uk", "go to URL and bbc URL"),
        ] {
            assert_eq!(by_kind(intent), kinds);
        }
        for intent in [
            "GET /repos/{owner}/issues",
            "call POST /v1/charges",
            "what is 7/2 and/or 1.5/2.5",
            "call `POST /v1/charges` and GET: /v1/charges",
            "read notes.txt, e.g. its end. Then stop",
            "a :// b ://",
            "é:é é/é",
        ] {
            assert_eq!(by_kind(intent), intent);
        }
    }

    fn words_of(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        words(text, |word| found.push(word.to_owned()));
        found
    }

    #[test]
    fn identifiers_are_taken_apart_as_a_reader_would() {
        for (text, expected) in [
            ("getStock", "get stock"),
            ("HTTPServer", "http server"),
            ("find_parts.v2", "find parts v 2"),
            ("GET /v1/users", "get v 1 users"),
            ("OAuth2Token", "o auth 2 token"),
            ("Größe", "größe"),
            ("a\0b\u{1b}[31m", "a b 31 m"),
            ("", ""),
        ] {
            assert_eq!(words_of(text).join(" "), expected, "{text:?}");
        }
    }

    #[test]
    fn a_word_without_end_is_cut() {
        assert_eq!(words_of(&"x".repeat(100_000)), ["x".repeat(WORD_CHARS_MAX)]);
    }

    #[test]
    fn stop_words_are_sorted_so_that_each_is_found() {
        assert!(STOP_WORDS.is_sorted());
        assert!(STOP_WORDS.iter().all(|word| is_stop_word(word)));
        assert!(!is_stop_word("invoice"));
    }

    #[test]
    fn a_request_falls_into_its_sentences_and_a_number_stays_whole() {
        let of = |text, most| sentences(text, most).iter().map(|it| it.text).collect::<Vec<_>>();
        assert_eq!(
            of("Book a room for 3.5 hours. Then tell Ann! And?", 8),
            ["Book a room for 3.5 hours.", "Then tell Ann!", "And?"]
        );
        assert_eq!(of("aa. bb. cc.", 2), ["aa.", "bb. cc."]);
        assert_eq!(of("a\nb\nc é\n", 2), ["a", "b\nc é"]);
        assert!(sentences(" ... ", 8).is_empty() && sentences("", 8).is_empty());
    }

    #[test]
    fn one_sentence_falls_into_what_it_joins_if_each_part_says_enough() {
        let of = |text, most| steps(text, most).iter().map(|it| it.text).collect::<Vec<_>>();
        let asked = "Create an issue for the pod, and then post its link and tell Ann Ä";
        let parts = ["Create an issue for the pod", "post its link", "tell Ann Ä"];
        assert_eq!(of(asked, 8), parts);
        assert_eq!(of(asked, 2), [parts[0], "post its link and tell Ann Ä"]);
        assert_eq!(of("buy bread and butter", 8), ["buy bread and butter"]);
        let several = format!("{asked}. And then?");
        assert_eq!(of(&several, 8).len(), 2);
        let story = format!("{asked} {}", "because of it".repeat(10));
        assert_eq!(of(&story, 8), [&story]);
    }

    #[test]
    fn what_is_sent_by_its_own_name_is_sent() {
        for (asked, read) in [
            ("email Tom", "send email Tom"),
            ("Find the invoice and email it to Tom", "Find the invoice and send email it to Tom"),
            ("Find it, mail the team", "Find it, send mail the team"),
            ("I want to message her", "I want to send message her"),
            // Here it is what there is.
            ("email addresses of Tom", "email addresses of Tom"),
            ("read the email Tom sent", "read the email Tom sent"),
            ("find a person by email", "find a person by email"),
            ("", ""),
        ] {
            assert_eq!(with_sending(asked), read);
        }
    }

    #[test]
    fn the_lines_of_a_list_are_told_from_the_sentences_of_a_paragraph() {
        let lines = |text| sentences(text, 8).iter().map(|it| it.is_line).collect::<Vec<_>>();
        let list = "1. Send it to Dr. Smith; now.\n2) Order it\n\n- Tell Ann";
        assert_eq!(lines(list), [true, true, true]);
        assert_eq!(sentences(list, 8)[0].text, "Send it to Dr. Smith; now.");
        assert_eq!(lines("find it\norder it"), [true, true]);
        assert_eq!(lines("Find it. Order it.\nTell Ann."), [false, false, true]);
        let wrapped = "Book a room for ten people on Friday afternoon and\ninvite everybody to it.";
        assert_eq!(lines(wrapped)[1..], [false]);
        assert_eq!(lines("Find it. Order it."), [false, false]);
        assert_eq!(lines("Find it\n"), [false]);
    }
}
