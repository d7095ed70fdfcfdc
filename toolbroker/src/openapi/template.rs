//! A path with its parameters, and which values it can hold.

use std::ops::Range;

use super::Refusal;
use super::name::{folded, is_one_of, names_of};
use super::parameter::{Parameter, Place};
use crate::uri::{climbs, leads_nowhere, percent_decoded};

/// A path with its parameters, and the query that documents write behind it where one
/// address has several operations (`/messages?beta=true`).
#[derive(Debug)]
pub(super) struct Path {
    pub(super) shown: String,
    pieces: Vec<Piece>,
    /// As it stands; empty if there is none.
    pub(super) query: String,
    /// What is set there, as the most careless server reads it.
    pub(super) set: Vec<String>,
    /// Where pieces from a parameter to a parameter share a segment.
    shared: Vec<Range<usize>>,
}

#[derive(Debug)]
enum Piece {
    /// As it stands.
    Literal(String),
    /// The parameter at this place in the list.
    Parameter(usize),
}

impl Path {
    pub(super) fn parse(text: &str, parameters: &[Parameter]) -> Result<Self, Refusal> {
        let refused = || Refusal::Unsupported("its path is not one that can be asked for".into());
        let is_plain = |c: char| c.is_ascii_graphic() && !"?#\\{}".contains(c);
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let set = match text.contains('?') {
            true => names_of(query).ok_or_else(refused)?,
            false => Vec::new(),
        };
        let mut pieces = Vec::new();
        let mut used = Vec::new();
        let mut rest = path;
        while let Some(open) = rest.find('{') {
            let (literal, inner) = rest.split_at(open);
            let (name, after) = inner[1..].split_once('}').ok_or_else(refused)?;
            let place = |it: &Parameter| it.place == Place::Path && it.name == name;
            let at = parameters.iter().position(place).ok_or_else(|| {
                let why = format!("its path has {{{name}}}, which is no parameter of it");
                Refusal::Unsupported(crate::cut(&why, 256))
            })?;
            pieces.push(Piece::Literal(literal.to_owned()));
            pieces.push(Piece::Parameter(at));
            used.push(at);
            rest = after;
        }
        pieces.push(Piece::Literal(rest.to_owned()));
        let plain = pieces.iter().all(|piece| match piece {
            Piece::Literal(text) => text.chars().all(is_plain),
            Piece::Parameter(_) => true,
        });
        let all = parameters
            .iter()
            .enumerate()
            .all(|(at, parameter)| parameter.place != Place::Path || used.contains(&at));
        if !plain
            || !query.chars().all(is_plain)
            || !text.starts_with('/')
            || text.starts_with("//")
        {
            return Err(refused());
        }
        let is_said =
            |it: &&Parameter| it.place == Place::Query && is_one_of(&set, &folded(&it.name));
        if let Some(said) = parameters.iter().find(is_said) {
            let why = format!("its path says already what its parameter {:?} is", said.name);
            return Err(Refusal::Unsupported(crate::cut(&why, 256)));
        }
        if !all {
            let why = "a path parameter of it is not in its path";
            return Err(Refusal::Unsupported(why.into()));
        }
        let shared = shared(&pieces);
        if let Some(it) =
            shared.iter().find(|it| separators(&pieces[(*it).clone()]).any(str::is_empty))
        {
            let names = pieces[it.clone()].iter().filter_map(|piece| match piece {
                Piece::Parameter(at) => Some(format!("{{{}}}", parameters.get(*at)?.name)),
                Piece::Literal(_) => None,
            });
            let names = names.collect::<Vec<_>>().join(" and ");
            let why = format!(
                "its path has nothing between {names} somewhere: nobody can tell where one ends"
            );
            return Err(Refusal::Unsupported(crate::cut(&why, 256)));
        }
        Ok(Self { shown: text.to_owned(), pieces, query: query.to_owned(), set, shared })
    }

    /// The path with these values.
    pub(super) fn fill(
        &self,
        value: impl Fn(usize) -> Result<String, String>,
    ) -> Result<String, String> {
        let texts = self.texts(value)?;
        for shared in &self.shared {
            let separators: Vec<&str> = separators(&self.pieces[shared.clone()]).collect();
            if !is_read_in_one_way(&texts[shared.clone()].concat(), &separators) {
                return Err(format!(
                    "parameters that share a segment of the path are parted by {separators:?} there: \
                     with these values they could be parted otherwise; none may have that in it"
                ));
            }
        }
        unclimbing(&texts)
    }

    /// The texts of its pieces.
    pub(super) fn texts(
        &self,
        value: impl Fn(usize) -> Result<String, String>,
    ) -> Result<Vec<String>, String> {
        let text = |piece: &Piece| match piece {
            Piece::Literal(text) => Ok(text.clone()),
            Piece::Parameter(at) => value(*at),
        };
        self.pieces.iter().map(text).collect()
    }
}

/// The path of these texts, unless whoever reads it would climb with it: many servers
/// decode all of it first, `%2F` too, and choose by what is left once `..` is resolved.
pub(super) fn unclimbing(texts: &[String]) -> Result<String, String> {
    let path = texts.concat();
    let is_none = |segment: &str| !segment.is_empty() && leads_nowhere(segment);
    if climbs(&path) || path.split('/').any(is_none) {
        let why = "a segment of the path would be `.`, `..` or nothing, once it is decoded";
        return Err(why.into());
    }
    Ok(path)
}

/// Where pieces of a path, from a parameter to a parameter, share a segment.
fn shared(pieces: &[Piece]) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for (at, around) in pieces.windows(3).enumerate() {
        let [Piece::Parameter(_), Piece::Literal(between), Piece::Parameter(_)] = around else {
            continue;
        };
        match all.last_mut() {
            _ if between.contains('/') => {}
            Some(last) if last.end == at + 1 => last.end = at + 3,
            _ => all.push(at..at + 3),
        }
    }
    all
}

/// What stands as it is among these pieces.
fn separators(pieces: &[Piece]) -> impl Iterator<Item = &str> {
    pieces.iter().filter_map(|piece| match piece {
        Piece::Literal(text) => Some(text.as_str()),
        Piece::Parameter(_) => None,
    })
}

/// Whether values with these separators between them, as they stand in a path, can be
/// parted in one way only. Servers match what is decoded, some without regard to case, and
/// take what they find first or last: `a..` before `...` and `b` would be `a` and `..b`.
fn is_read_in_one_way(text: &str, separators: &[&str]) -> bool {
    let plain = |text: &str| percent_decoded(text.as_bytes()).to_ascii_lowercase();
    let text = plain(text);
    // In how many ways what is before a place can be read, up to the separator so far.
    // More than two are two.
    let mut ways = vec![1_u8; text.len() + 1];
    for separator in separators {
        let separator = plain(separator);
        let mut next = vec![0_u8; text.len() + 1];
        for end in separator.len()..=text.len() {
            let start = end - separator.len();
            let here = if text[start..end] == separator { ways[start] } else { 0 };
            let before = if end > 0 { next[end - 1] } else { 0 };
            next[end] = (before + here).min(2);
        }
        ways = next;
    }
    ways.last() == Some(&1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_arguments_of_a_segment_are_looked_at_together() {
        let parse = |text: &str| Path::parse(text, &["a", "b", "c"].map(Parameter::in_path));
        let fill =
            |text: &str, values: [&str; 3]| parse(text).unwrap().fill(|at| Ok(values[at].into()));
        assert_eq!(fill("/{a}-{b}--{c}", ["1", "2", "3"]).unwrap(), "/1-2--3");
        assert_eq!(fill("/{a}-{b}/{c}", ["1", "2", "3-4"]).unwrap(), "/1-2/3-4");
        for values in [["1-2", "3", "4"], ["1", "2-3", "4"], ["1", "2", "3-4"]] {
            assert!(fill("/{a}-{b}-{c}", values).is_err(), "{values:?}");
        }
        let refused = parse("/{a}-{b}{c}").unwrap_err().to_string();
        assert!(refused.contains("{a} and {b} and {c}"), "{refused}");
        assert!(parse("/{a}/{b}{c}").is_err());
        assert!(parse("/{a}/{b}/{c}").is_ok());
    }
}
