//! What blocks that a holder appends may hold, and what they may cost.
//!
//! # What a later block may hold
//! Facts, each of which can only take something away:
//!
//! ```text
//! calls_max(3);                               the smallest counts
//! cost_max(10);                               the smallest counts
//! expires(2026-11-21T12:00:00Z);              the first counts
//! session("s-17");                            all must be the same
//! constraint("shop.order", "/quantity<=5");   all must hold
//! ```
//!
//! and checks over what the broker states: `time($now)`, and `call($tool)`
//! for each granted tool in turn. Anything else is refused, and the grant
//! with it: a fact that is misspelt would leave a right where its writer
//! believes to have taken it away.
//!
//! # What a later block may cost
//! The library's bounds on facts, rounds and time are looked at only between
//! rounds: one rule, or one check, that joins facts with each other runs for
//! hours inside a single round, and one that puts texts together keeps every
//! text on the way. So the shape is bounded before anything is evaluated: no
//! rules, few queries, and in each at most one predicate, of which the world
//! holds one fact. Operations are those of a list, none of which makes a value
//! larger than `true`; texts are no longer than a tool's name.
//!
//! What is left is one pass over the checks for each granted tool, and where a
//! check fails the library prints it: an operation prints again all that it
//! works on. So what is bounded are operations times values, `WORK_MAX` in
//! all blocks together: at most 4 MiB of text for a tool. Texts are looked up
//! in the order they came in, so that thousands of different ones cost some
//! ten milliseconds for a tool; a deadline over all tools of a grant ends what
//! that comes to. A condition over two facts is written as two checks.

use std::time::{SystemTime, UNIX_EPOCH};

use biscuit_auth::format::schema;
use forge_protocol::limits::{GRANTED_TOOLS_MAX, TOOL_NAME_BYTES_MAX};
use prost::Message as _;

use super::GrantError;

/// Blocks that may be appended to one token.
pub(super) const BLOCKS_MAX: usize = 16;
/// Facts and queries in all appended blocks together, each.
pub(super) const APPENDED_MAX: usize = 64;
/// Operations of an expression, times its values, in all appended blocks
/// together. [`attenuate`](super::attenuation::attenuate) writes three operations over a
/// set of tools.
const WORK_MAX: usize = BLOCKS_MAX * 4 * GRANTED_TOOLS_MAX;
/// The last second that a date in a token may name: the end of year 9999.
const DATE_UNIX_S_MAX: u64 = 253_402_300_799;
/// Symbols of a token's own begin here; below are those that every token has.
const SYMBOLS_OWN_MIN: u64 = 1024;
/// How many symbols every token has (Biscuit specification, "Symbol table").
const SYMBOLS_COMMON: u64 = 28;
/// The one of them that is `time`.
const SYMBOL_TIME: u64 = 5;

/// The symbols of a token and of the blocks appended to it so far.
#[derive(Default)]
pub(super) struct Symbols(pub(super) Vec<String>);

impl Symbols {
    pub(super) fn get(&self, symbol: u64) -> Option<&str> {
        let own = usize::try_from(symbol.checked_sub(SYMBOLS_OWN_MIN)?).ok()?;
        self.0.get(own).map(String::as_str)
    }

    fn has(&self, symbol: u64) -> bool {
        symbol < SYMBOLS_COMMON || self.get(symbol).is_some()
    }
}

pub(super) fn undecodable(error: prost::DecodeError) -> GrantError {
    GrantError::Forged(error.to_string())
}

/// Refuses appended blocks that hold what they may not, or whose evaluation
/// is not linear in their size.
pub(super) fn check_shape(token: &[u8]) -> Result<(), GrantError> {
    let token = schema::Biscuit::decode(token).map_err(undecodable)?;
    if token.blocks.len() > BLOCKS_MAX {
        return Err(GrantError::Shape(
            "is one too many: a grant has at most 16 of them, so have its issuer make a narrower one",
        ));
    }
    let decode = |block: &[u8]| schema::Block::decode(block).map_err(undecodable);
    let mut symbols = Symbols(decode(&token.authority.block)?.symbols);
    let (mut facts, mut queries, mut work) = (0, 0, 0);
    for signed in &token.blocks {
        if signed.external_signature.is_some() {
            // Its symbols are its own, and nobody here trusts its signer.
            return Err(GrantError::Shape("is a third party's"));
        }
        let block = decode(&signed.block)?;
        symbols.0.extend(block.symbols);
        if !block.rules.is_empty() {
            return Err(GrantError::Shape("has a rule"));
        }
        facts += block.facts.len();
        for fact in &block.facts {
            check_fact(&fact.predicate, &symbols)?;
        }
        for check in &block.checks {
            if check.kind() == schema::check::Kind::Reject && check.queries.len() > 1 {
                // biscuit-auth 6.0.0 lets it hold as soon as one of them does not
                // match, so it would take nothing away.
                return Err(GrantError::Shape(
                    "has a `reject if` of several queries joined by `or`: write several of one each",
                ));
            }
            // One that asks nothing fails, and is printed like any other.
            queries += check.queries.len().max(1);
            for query in &check.queries {
                work += work_of(query, &symbols)?;
            }
        }
    }
    if facts > APPENDED_MAX || queries > APPENDED_MAX {
        return Err(GrantError::Shape("has too many facts or checks"));
    }
    if work > WORK_MAX {
        return Err(GrantError::Shape(
            "has too many operations or values in its checks: all blocks count together, and one \
             set of tools, {…}.contains($tool), says it with the fewest",
        ));
    }
    Ok(())
}

fn check_fact(fact: &schema::Predicate, symbols: &Symbols) -> Result<(), GrantError> {
    use schema::term::Content;
    let terms: Vec<Option<&Content>> =
        fact.terms.iter().map(|term| term.content.as_ref()).collect();
    let narrows = match (symbols.get(fact.name), terms.as_slice()) {
        (Some("calls_max" | "cost_max"), [Some(Content::Integer(_))]) => true,
        (Some("session"), [Some(Content::String(text))]) => symbols.has(*text),
        (Some("constraint"), [Some(Content::String(tool)), Some(Content::String(text))]) => {
            symbols.has(*tool) && symbols.has(*text)
        }
        // A later one has no place in the clock's own type.
        (Some("expires"), [Some(Content::Date(date))]) => *date <= DATE_UNIX_S_MAX,
        _ => false,
    };
    if narrows {
        Ok(())
    } else {
        Err(GrantError::Shape(
            "has a fact that narrows nothing: known are calls_max(number), cost_max(number), \
             expires(date), session(text) and constraint(tool, text)",
        ))
    }
}

/// What a query may cost; it is refused if that is not bounded.
fn work_of(query: &schema::Rule, symbols: &Symbols) -> Result<usize, GrantError> {
    let stated = |predicate: &schema::Predicate| {
        let name = predicate.name;
        predicate.terms.len() == 1 && (name == SYMBOL_TIME || symbols.get(name) == Some("call"))
    };
    if query.body.len() > 1 {
        return Err(GrantError::Shape(
            "has a check that joins predicates: write several checks of one predicate each",
        ));
    }
    // The library writes of a head with terms to our standard output.
    if !query.body.iter().all(stated) || !query.head.terms.is_empty() {
        return Err(GrantError::Shape(
            "has a check over what is not stated: known are time($now) and call($tool)",
        ));
    }
    let mut work = 0;
    for term in query.body.iter().flat_map(|predicate| &predicate.terms) {
        work += values_of(term, symbols)?;
    }
    for expression in &query.expressions {
        let mut values = 1;
        for op in &expression.ops {
            values += check_op(op, symbols)?;
        }
        work += values * expression.ops.len().max(1);
    }
    Ok(work)
}

/// How many values an operation brings. Allowed are those whose result is
/// `true` or `false`, over values that [`values_of`] allows. Closures nest
/// loops; a regular expression is compiled anew for every tool; texts that are
/// added stay, each of them, and `+` is the same for numbers.
fn check_op(op: &schema::Op, symbols: &Symbols) -> Result<usize, GrantError> {
    use schema::op::Content;
    use schema::op_binary::Kind as Binary;
    use schema::op_unary::Kind as Unary;
    const UNARY: [Unary; 2] = [Unary::Negate, Unary::Parens];
    const BINARY: [Binary; 13] = [
        Binary::LessThan,
        Binary::GreaterThan,
        Binary::LessOrEqual,
        Binary::GreaterOrEqual,
        Binary::Equal,
        Binary::NotEqual,
        Binary::HeterogeneousEqual,
        Binary::HeterogeneousNotEqual,
        Binary::Contains,
        Binary::Prefix,
        Binary::Suffix,
        Binary::And,
        Binary::Or,
    ];
    match &op.content {
        Some(Content::Value(value)) => values_of(value, symbols),
        Some(Content::Unary(unary)) if UNARY.iter().any(|kind| *kind as i32 == unary.kind) => Ok(0),
        Some(Content::Binary(binary)) if BINARY.iter().any(|kind| *kind as i32 == binary.kind) => {
            Ok(0)
        }
        Some(Content::Unary(_) | Content::Binary(_) | Content::Closure(_)) | None => {
            Err(GrantError::Shape(
                "has an operation that no check may hold: known are comparisons, `contains`, \
                 `starts_with`, `ends_with`, `!` and parentheses; for `&&` write a comma, for `||` \
                 write `or` and the predicate again",
            ))
        }
    }
}

/// How many values a value of a check holds, itself among them. What is
/// compared is a time or a tool's name.
fn values_of(value: &schema::Term, symbols: &Symbols) -> Result<usize, GrantError> {
    use schema::term::Content;
    let short = |symbol: u64| match symbols.get(symbol) {
        Some(text) if text.len() > TOOL_NAME_BYTES_MAX => {
            Err(GrantError::Shape("has a text in a check that is longer than any tool's name"))
        }
        _ => Ok(1),
    };
    let all = |items: &[schema::Term]| {
        items.iter().try_fold(1, |sum, item| Ok(sum + values_of(item, symbols)?))
    };
    match &value.content {
        Some(Content::String(text)) => short(*text),
        // Its name is printed too.
        Some(Content::Variable(name)) => short((*name).into()),
        Some(Content::Integer(_) | Content::Date(_) | Content::Bool(_)) => Ok(1),
        Some(Content::Set(set)) => all(&set.set),
        Some(Content::Array(array)) => all(&array.array),
        Some(Content::Bytes(_) | Content::Null(_) | Content::Map(_)) | None => {
            Err(GrantError::Shape(
                "has a value in a check that is neither text, number, date, true or false, nor a \
                 set or list of them",
            ))
        }
    }
}

/// A date of a token, in seconds since the Unix epoch.
pub(super) fn unix_s(date: SystemTime) -> u64 {
    date.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
