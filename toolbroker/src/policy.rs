//! Which tools a principal may see: the operator's word, by roles.
//!
//! A role names tools, a principal has roles. What a principal may not see is
//! in none of its lists, is found by no search of its, and is granted to no
//! run of its: to this principal the tool does not exist. Where the operator
//! names neither principals nor roles, there is one principal in truth, and
//! everything is everybody's; where there are any, one who is not named sees
//! nothing. Principals are names that a supervisor gives, who is trusted to
//! know them. Deliberately absent are rules that take away: what no role
//! names is not there.

use std::collections::BTreeMap;

use forge_protocol::name::{NameError, ToolName, is_server_name};

/// Which tools each principal may see.
#[derive(Clone, Debug, Default)]
pub struct Policy(Option<BTreeMap<String, Vec<Pattern>>>);

/// Some tools: `*`, a beginning of names as `shop.*` or `shop.get_*`, or one
/// name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every tool.
    All,
    /// The tools whose names begin so.
    Prefix(String),
    /// One tool.
    One(ToolName),
}

/// Why a text names no tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// It is neither a name nor the beginning of one.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A star stands where it would stand for nothing.
    #[error("a star stands at the end and nowhere else, as in shop.get_*")]
    Star,
}

impl Pattern {
    /// Reads a pattern. A star stands at the end and nowhere else, behind a
    /// whole server name.
    ///
    /// # Errors
    /// [`PatternError`].
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text == "*" {
            return Ok(Self::All);
        }
        let Some(prefix) = text.strip_suffix('*') else {
            return match ToolName::parse(text)? {
                // It would fit nothing, or what nobody meant.
                name if name.tool().contains('*') => Err(PatternError::Star),
                name => Ok(Self::One(name)),
            };
        };
        let (server, tool) = prefix.split_once('.').ok_or(NameError::NoServer)?;
        if !is_server_name(server) {
            return Err(NameError::BadServer.into());
        }
        if tool.contains('*') {
            return Err(PatternError::Star);
        }
        if tool.chars().any(char::is_control) {
            return Err(NameError::BadTool.into());
        }
        Ok(Self::Prefix(prefix.to_owned()))
    }

    fn fits(&self, tool: &ToolName) -> bool {
        match self {
            Self::All => true,
            Self::Prefix(prefix) => tool.as_str().starts_with(prefix.as_str()),
            Self::One(name) => name == tool,
        }
    }
}

impl Policy {
    /// Everything is everybody's.
    #[must_use]
    pub fn open() -> Self {
        Self(None)
    }

    /// Each principal sees what its patterns fit, and nobody else anything.
    #[must_use]
    pub fn of(principals: BTreeMap<String, Vec<Pattern>>) -> Self {
        Self(Some(principals))
    }

    /// Whether `principal` may see any tool of this server, and so the server.
    #[must_use]
    pub fn sees_server(&self, principal: &str, server: &str) -> bool {
        let of_it = |pattern: &Pattern| match pattern {
            Pattern::All => true,
            Pattern::Prefix(prefix) => {
                prefix.split_once('.').is_some_and(|(named, _)| named == server)
            }
            Pattern::One(name) => name.server() == server,
        };
        match &self.0 {
            None => true,
            Some(principals) => {
                principals.get(principal).is_some_and(|patterns| patterns.iter().any(of_it))
            }
        }
    }

    /// Whether `principal` may see `tool`.
    #[must_use]
    pub fn visible(&self, principal: &str, tool: &ToolName) -> bool {
        match &self.0 {
            None => true,
            Some(principals) => principals
                .get(principal)
                .is_some_and(|patterns| patterns.iter().any(|pattern| pattern.fits(tool))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sees(patterns: &[&str], tool: &str) -> bool {
        let patterns = patterns.iter().map(|text| Pattern::parse(text).unwrap()).collect();
        let policy = Policy::of(BTreeMap::from([("alice".to_owned(), patterns)]));
        let tool = ToolName::parse(tool).unwrap();
        assert!(!policy.visible("mallory", &tool), "an unknown principal sees {tool}");
        assert!(!policy.visible("", &tool));
        assert!(Policy::open().visible("mallory", &tool));
        policy.visible("alice", &tool)
    }

    #[test]
    fn a_principal_sees_what_its_roles_name_and_an_unknown_one_nothing() {
        assert!(sees(&["shop.*"], "shop.find"));
        assert!(!sees(&["shop.*"], "shop2.find"));
        assert!(sees(&["shop.get_*"], "shop.get_stock"));
        assert!(!sees(&["shop.get_*"], "shop.set_stock"));
        assert!(sees(&["a.b", "crypto.hash"], "crypto.hash"));
        assert!(!sees(&["crypto.hash"], "crypto.hash2"));
        assert!(sees(&["*"], "shop.find"));
        assert!(!sees(&[], "shop.find"));
    }

    #[test]
    fn a_server_is_seen_by_whoever_may_see_a_tool_of_it() {
        let patterns = ["shop.get_*", "mail.send"].map(|text| Pattern::parse(text).unwrap());
        let policy = Policy::of(BTreeMap::from([("alice".to_owned(), patterns.to_vec())]));
        assert!(policy.sees_server("alice", "shop") && policy.sees_server("alice", "mail"));
        assert!(!policy.sees_server("alice", "sho") && !policy.sees_server("mallory", "shop"));
        assert!(!policy.sees_server("alice", "shops") && !policy.sees_server("alice", "mails"));
        assert!(Policy::open().sees_server("mallory", "shop"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in ["", "shop", "shop*", "**", "*.find", "shop.*.x*", "Shop.*", "shop.*x", ".*"] {
            let read = Pattern::parse(text);
            assert!(read.is_err(), "{text}: {read:?}");
        }
        assert_eq!(Pattern::parse("shop.g*t"), Err(PatternError::Star));
    }
}
