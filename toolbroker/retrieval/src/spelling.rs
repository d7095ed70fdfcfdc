//! Slips of the pen: a word of an intent that nobody has, read as the one that was meant.
//!
//! Only what tools say can be meant, and only what is no word of English is a slip, so a
//! correct intent stays as it is but for names and jargon that are a letter away from a
//! tool's.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::embedding::Table;
use crate::text;

/// A shorter word has too many neighbours for one of them to be meant.
const SLIP_BYTES_MIN: usize = 5;
/// Words of one first letter and length that are kept, those that came first: a server
/// that says very many must not make each search slow.
const KEPT_MAX: usize = if cfg!(test) { 8 } else { 4096 };
/// Words of an intent that are looked up.
const LOOKED_UP_MAX: usize = 32;

/// What tools say: by its first letter and length each word, with how many tools have it.
#[derive(Default)]
pub(crate) struct Spelling(BTreeMap<(u8, usize), BTreeMap<String, u32>>);

impl Spelling {
    /// Takes up the words of one tool.
    pub(crate) fn take(&mut self, texts: &[&str]) {
        let mut own = BTreeSet::new();
        for text in texts {
            text::words(text, |word| {
                if word.len() + 1 >= SLIP_BYTES_MIN && is_plain(word) {
                    own.insert(word.to_owned());
                }
            });
        }
        for word in own {
            let alike = self.0.entry(place(&word)).or_default();
            let has_room = alike.len() < KEPT_MAX;
            match alike.get_mut(&word) {
                Some(tools) => *tools += 1,
                None if has_room => drop(alike.insert(word, 1)),
                None => {}
            }
        }
    }

    /// An intent with the words that were meant in the place of the slips in it: of a word in
    /// lower case that is no `table`'s and not `known`, and begins like it should.
    pub(crate) fn corrected<'a>(
        &self,
        intent: &'a str,
        table: &Table,
        known: impl Fn(&str) -> bool,
    ) -> Cow<'a, str> {
        let mut out = String::new();
        let (mut kept, mut looked_up) = (0, 0);
        for word in intent.split(|c: char| !c.is_alphanumeric()) {
            let may_be = word.len() >= SLIP_BYTES_MIN && is_plain(word);
            if !may_be || table.has(word) || text::is_stop_word(word) || known(word) {
                continue;
            }
            looked_up += 1;
            if looked_up > LOOKED_UP_MAX {
                break;
            }
            if let Some(meant) = self.nearest(word) {
                let begins = word.as_ptr().addr() - intent.as_ptr().addr();
                out.push_str(&intent[kept..begins]);
                out.push_str(meant);
                kept = begins + word.len();
            }
        }
        if kept == 0 {
            return Cow::Borrowed(intent);
        }
        out.push_str(&intent[kept..]);
        Cow::Owned(out)
    }

    /// The word one slip away that most tools have.
    fn nearest(&self, word: &str) -> Option<&str> {
        let (first, length) = place(word);
        let near = (length - 1..=length + 1).filter_map(|length| self.0.get(&(first, length)));
        let meant = near.flatten().filter(|(other, _)| is_slip(word.as_bytes(), other.as_bytes()));
        // Of equals the first in the alphabet.
        meant.max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map(|(meant, _)| meant.as_str())
    }
}

fn place(word: &str) -> (u8, usize) {
    (word.as_bytes().first().copied().unwrap_or_default(), word.len())
}

fn is_plain(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_lowercase())
}

/// Whether a letter too many, one too few, another one, or two in the wrong order are all
/// that is between two words.
fn is_slip(mut a: &[u8], mut b: &[u8]) -> bool {
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b)
        && x == y
    {
        (a, b) = (rest_a, rest_b);
    }
    while let ([rest_a @ .., x], [rest_b @ .., y]) = (a, b)
        && x == y
    {
        (a, b) = (rest_a, rest_b);
    }
    match (a, b) {
        ([], [_]) | ([_], []) | ([_], [_]) => true,
        ([a, b], [c, d]) => a == d && b == c,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedding::TABLE;

    fn corrected(tools: &[&str], intent: &str) -> String {
        let mut spelling = Spelling::default();
        tools.iter().for_each(|tool| spelling.take(&[tool]));
        let known = |word: &str| tools.iter().any(|tool| tool.contains(word));
        spelling.corrected(intent, &TABLE, known).into_owned()
    }

    #[test]
    fn one_slip_is_a_letter_more_or_less_or_another_or_two_that_changed_places() {
        let meant = "invoices";
        for slip in ["invoces", "invooices", "inboices", "invocies", "invoice", "invoicess"] {
            let (a, b) = (slip, meant);
            assert!(is_slip(a.as_bytes(), b.as_bytes()), "{a}");
            assert!(is_slip(b.as_bytes(), a.as_bytes()), "{a}");
        }
        for (a, b) in [("search", "search"), ("sreahc", "search"), ("seorch", "serach"), ("", "ab")]
        {
            assert!(!is_slip(a.as_bytes(), b.as_bytes()), "{a}");
        }
    }

    #[test]
    fn what_was_meant_is_what_most_tools_say_and_the_rest_of_the_intent_stays() {
        let tools = ["Search Confluence", "search invoices", "Invoicer, an invoicex"];
        assert_eq!(
            corrected(&tools, "serach  confluece (é) for invoicez!"),
            "search  confluence (é) for invoicer!"
        );
        assert_eq!(corrected(&["seat invoicez", "invoicey", "invoicey"], "invoicet"), "invoicey");
    }

    #[test]
    fn what_may_be_right_is_no_slip() {
        // A word of English, a name, one with figures, a short one, another first letter, and
        // what a tool says.
        let tools = ["stats form clients restore backups kubectl"];
        for intent in
            ["states", "Kubectx", "kubectl2", "forn", "cubectl", "kubectl", "kubéctl", "", "!"]
        {
            assert_eq!(corrected(&tools, intent), intent);
        }
    }

    #[test]
    fn of_tools_that_say_very_much_so_many_words_are_kept() {
        let noise: String = ('a'..='z').map(|it| format!("zzzz{it} ")).collect();
        let tools = [&noise, "zebra zzzza"];
        let mut spelling = Spelling::default();
        tools.iter().for_each(|tool| spelling.take(&[tool]));
        let kept = &spelling.0[&(b'z', 5)];
        assert_eq!((kept.len(), kept["zzzza"]), (KEPT_MAX, 2));
    }

    #[test]
    fn of_an_intent_without_end_only_so_many_words_are_looked_up() {
        let slips = "confluece ".repeat(LOOKED_UP_MAX + 1);
        let meant = corrected(&["confluence"], &slips);
        assert_eq!(meant.matches("confluence").count(), LOOKED_UP_MAX);
        assert!(meant.ends_with("confluece "));
    }
}
