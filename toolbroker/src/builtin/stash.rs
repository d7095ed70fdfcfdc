//! `stash`: notes that outlive a run, in the broker's memory.
//!
//! | scope | who sees it |
//! |---|---|
//! | a session | the runs of one session of one principal |
//! | a run | one run, where there is no session |
//! | a group | all runs of the principals that the operator put into it |
//!
//! A caller's own scope follows from its connection; a group has to be named
//! in the call and is refused to everybody outside. Every entry ends: after
//! its time, with the run that is its scope, or with the broker. All sizes are
//! bounded, per scope, per principal and in all, and what is full refuses:
//! nobody's entry is thrown out for another's.
//! Deliberately absent are the disk and a clock of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use rmcp::model::JsonObject;
use serde_json::{Value, json};

use super::{Caller, Failure, Plan, Work, text};
use crate::definition::Effect;
use crate::locks::lock;

/// A key, in bytes.
const KEY_BYTES_MAX: usize = 256;
/// What an entry is counted beside its key and value, in bytes: about what
/// the maps take for it.
const ENTRY_BYTES: usize = 256;
/// Keys in one list.
const LISTED_MAX: usize = 1_000;

/// What the operator allows.
#[derive(Clone, Debug)]
pub struct Terms {
    /// How long an entry lives that says nothing else, and the longest that
    /// one can ask for.
    pub lifetime: Duration,
    /// Entries of one scope.
    pub entries_max: usize,
    /// Keys and values of one scope, in bytes.
    pub bytes_max: usize,
    /// Keys and values of all scopes, in bytes.
    pub total_bytes_max: usize,
    /// Groups, and the principals in each.
    pub groups: BTreeMap<String, BTreeSet<String>>,
}

impl Terms {
    /// Keys and values that one principal put into any scope, in bytes: half
    /// of all, so that none fills the stash for the others, but as much as one
    /// scope may hold.
    fn principal_bytes_max(&self) -> usize {
        (self.total_bytes_max / 2).max(self.bytes_max)
    }
}

/// Tells the time.
type Clock = Box<dyn Fn() -> Instant + Send + Sync>;

/// All notes.
pub(super) struct Stash {
    terms: Terms,
    clock: Clock,
    held: Mutex<Held>,
}

impl fmt::Debug for Stash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stash").field("terms", &self.terms).finish_non_exhaustive()
    }
}

/// Whose an entry is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Scope {
    Session { principal: Arc<str>, session: Arc<str> },
    Run { principal: Arc<str>, run: RunId },
    Group(Arc<str>),
}

#[derive(Default)]
struct Held {
    shelves: HashMap<Scope, Shelf>,
    /// Every entry once, by its end; the number tells apart what ends
    /// together.
    ends: BTreeMap<(Instant, u64), (Scope, Arc<str>)>,
    next: u64,
    bytes: usize,
    /// By who put it there.
    bytes_of: HashMap<Arc<str>, usize>,
}

#[derive(Default)]
struct Shelf {
    entries: BTreeMap<Arc<str>, Entry>,
    bytes: usize,
}

struct Entry {
    /// JSON, as text: parsed, a small text can be a large value.
    value: String,
    end: (Instant, u64),
    /// Who put it there.
    principal: Arc<str>,
}

fn entry_bytes(key: &str, value: &str) -> usize {
    key.len() + value.len() + ENTRY_BYTES
}

impl Held {
    fn remove(&mut self, scope: &Scope, key: &str) -> Option<Entry> {
        let shelf = self.shelves.get_mut(scope)?;
        let entry = shelf.entries.remove(key)?;
        let bytes = entry_bytes(key, &entry.value);
        shelf.bytes -= bytes;
        self.bytes -= bytes;
        if let Some(all) = self.bytes_of.get_mut(&entry.principal) {
            *all -= bytes;
            if *all == 0 {
                self.bytes_of.remove(&entry.principal);
            }
        }
        self.ends.remove(&entry.end);
        if shelf.entries.is_empty() {
            self.shelves.remove(scope);
        }
        Some(entry)
    }

    /// Removes what is over. Each entry is removed once, so that this costs
    /// no more than putting it there did.
    fn forget_the_past(&mut self, now: Instant) {
        while let Some(first) = self.ends.first_entry() {
            if first.key().0 > now {
                return;
            }
            let (scope, key) = first.get().clone();
            self.remove(&scope, &key);
        }
    }
}

impl Stash {
    /// An empty one.
    pub(super) fn new(terms: Terms, clock: Clock) -> Self {
        Self { terms, clock, held: Mutex::default() }
    }

    /// Forgets what a run that is over kept for itself alone.
    pub(super) fn forget_run(&self, caller: &Caller) {
        if caller.session.is_some() {
            return;
        }
        let scope = own(caller);
        self.with(|held, _| {
            let shelf = held.shelves.get(&scope);
            let keys: Vec<Arc<str>> =
                shelf.into_iter().flat_map(|shelf| shelf.entries.keys().cloned()).collect();
            for key in keys {
                held.remove(&scope, &key);
            }
        });
    }

    fn scope(&self, caller: &Caller, arguments: &JsonObject) -> Result<Scope, Failure> {
        if let Some(group) = text(arguments, "group") {
            let member = |members: &BTreeSet<String>| members.contains(caller.principal.as_ref());
            if !self.terms.groups.get(group).is_some_and(member) {
                return Err(Failure::new(
                    "not_allowed",
                    "this program is in no group of this name",
                ));
            }
            return Ok(Scope::Group(group.into()));
        }
        Ok(own(caller))
    }

    /// Does something with what is there now.
    fn with<T>(&self, work: impl FnOnce(&mut Held, Instant) -> T) -> T {
        let now = (self.clock)();
        let mut held = lock(&self.held);
        held.forget_the_past(now);
        work(&mut held, now)
    }

    fn put(&self, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
        let scope = self.scope(caller, arguments)?;
        let key = key_of(arguments)?;
        let value = arguments.get("value").unwrap_or(&Value::Null).to_string();
        let asked = arguments.get("ttl_s").and_then(whole).map(Duration::from_secs);
        let lifetime = asked.unwrap_or(self.terms.lifetime).min(self.terms.lifetime);
        let bytes = entry_bytes(key, &value);
        let full = |what: &str, limit: usize| {
            Err(Failure::new("full", format!("the stash is full: {what} {limit}")))
        };
        self.with(|held, now| {
            let (mut entries, mut scope_bytes) = match held.shelves.get(&scope) {
                Some(shelf) => (shelf.entries.len(), shelf.bytes),
                None => (0, 0),
            };
            let mut all_bytes = held.bytes;
            let mut principal_bytes = held.bytes_of.get(&caller.principal).copied().unwrap_or(0);
            // What it takes the place of makes room; it stays if there is
            // too little.
            let old = held.shelves.get(&scope).and_then(|shelf| shelf.entries.get(key));
            if let Some(old) = old {
                let freed = entry_bytes(key, &old.value);
                entries -= 1;
                scope_bytes -= freed;
                all_bytes -= freed;
                if old.principal == caller.principal {
                    principal_bytes -= freed;
                }
            }
            if entries >= self.terms.entries_max {
                return full("entries at most:", self.terms.entries_max);
            }
            if scope_bytes + bytes > self.terms.bytes_max {
                return full("bytes at most:", self.terms.bytes_max);
            }
            if principal_bytes + bytes > self.terms.principal_bytes_max() {
                return full("bytes of one principal at most:", self.terms.principal_bytes_max());
            }
            if all_bytes + bytes > self.terms.total_bytes_max {
                return full("bytes for all programs at most:", self.terms.total_bytes_max);
            }
            held.remove(&scope, key);
            let key: Arc<str> = key.into();
            let end = (now + lifetime, held.next);
            held.next += 1;
            held.bytes += bytes;
            let principal = Arc::clone(&caller.principal);
            *held.bytes_of.entry(Arc::clone(&principal)).or_default() += bytes;
            held.ends.insert(end, (scope.clone(), Arc::clone(&key)));
            let shelf = held.shelves.entry(scope).or_default();
            shelf.bytes += bytes;
            shelf.entries.insert(key, Entry { value, end, principal });
            Ok(json!({ "expires_in_s": lifetime.as_secs() }))
        })
    }

    fn get(&self, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
        let scope = self.scope(caller, arguments)?;
        let key = key_of(arguments)?;
        let found = self.with(|held, _| {
            let entry = held.shelves.get(&scope)?.entries.get(key)?;
            Some(entry.value.clone())
        });
        match found {
            None => Ok(json!({ "found": false })),
            Some(value) => {
                let value: Value = serde_json::from_str(&value)
                    .map_err(|error| Failure::new("failed", format!("bug: {error}")))?;
                Ok(json!({ "found": true, "value": value }))
            }
        }
    }

    fn delete(&self, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
        let scope = self.scope(caller, arguments)?;
        let key = key_of(arguments)?;
        let deleted = self.with(|held, _| held.remove(&scope, key)).is_some();
        Ok(json!({ "deleted": deleted }))
    }

    fn list(&self, caller: &Caller, arguments: &JsonObject) -> Result<Value, Failure> {
        let scope = self.scope(caller, arguments)?;
        let prefix = text(arguments, "prefix").unwrap_or_default();
        Ok(self.with(|held, now| {
            let shelf = held.shelves.get(&scope);
            let mut entries = shelf
                .into_iter()
                .flat_map(|shelf| {
                    shelf.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
                })
                .take_while(|(key, _)| key.starts_with(prefix));
            let listed: Vec<Value> = entries
                .by_ref()
                .take(LISTED_MAX)
                .map(|(key, entry)| {
                    let left = entry.end.0.saturating_duration_since(now);
                    json!({
                        "key": key.as_ref(),
                        "bytes": entry.value.len(),
                        "expires_in_s": left.as_secs(),
                    })
                })
                .collect();
            json!({ "entries": listed, "truncated": entries.next().is_some() })
        }))
    }
}

/// A whole number, however it is written: `5.0` is an integer to JSON Schema.
fn whole(number: &Value) -> Option<u64> {
    // What is beyond both ends becomes the end.
    number.as_u64().or_else(|| Some(number.as_f64().filter(|it| it.fract() == 0.0)? as u64))
}

/// The scope that a caller has without naming one.
fn own(caller: &Caller) -> Scope {
    let principal = Arc::clone(&caller.principal);
    match &caller.session {
        Some(session) => Scope::Session { principal, session: Arc::clone(session) },
        None => Scope::Run { principal, run: caller.run },
    }
}

fn key_of(arguments: &JsonObject) -> Result<&str, Failure> {
    match text(arguments, "key") {
        Some(key) if (1..=KEY_BYTES_MAX).contains(&key.len()) => Ok(key),
        _ => Err(Failure::bad_request(format!("a key has 1 to {KEY_BYTES_MAX} bytes"))),
    }
}

/// `stash.put`, `stash.get`, `stash.delete` and `stash.list`.
pub(super) fn plans(stash: &Arc<Stash>) -> Vec<Plan> {
    let groups: Vec<&String> = stash.terms.groups.keys().collect();
    let scoped = |mut properties: JsonObject, required: &[&str]| {
        if !groups.is_empty() {
            let description = "The group's stash in place of one's own.";
            properties
                .insert("group".into(), json!({ "enum": groups, "description": description }));
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    };
    let keyed = || {
        let mut properties = JsonObject::new();
        let key = json!({ "type": "string", "minLength": 1, "maxLength": KEY_BYTES_MAX });
        properties.insert("key".into(), key);
        properties
    };
    let answer = |properties: Value, required: &[&str]| {
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    };
    let mut put_arguments = keyed();
    put_arguments.insert("value".into(), json!({ "description": "Any JSON." }));
    let lifetime_s = stash.terms.lifetime.as_secs();
    put_arguments.insert(
        "ttl_s".into(),
        json!({
            "type": "integer",
            "minimum": 1,
            "description": format!("How long to keep it, in seconds; at most {lifetime_s}."),
        }),
    );
    let mut list_arguments = JsonObject::new();
    list_arguments.insert("prefix".into(), json!({ "type": "string", "maxLength": KEY_BYTES_MAX }));
    let seconds = json!({ "type": "integer", "minimum": 0 });
    let schemas = [
        (
            "put",
            "Keeps a value under a key, in place of what is there. It is seen by the runs of \
             the same session (by this run alone, if it belongs to none).",
            Effect::Write,
            scoped(put_arguments, &["key", "value"]),
            answer(json!({ "expires_in_s": seconds }), &["expires_in_s"]),
        ),
        (
            "get",
            "Gives back the value that was kept under a key.",
            Effect::Read,
            scoped(keyed(), &["key"]),
            answer(json!({ "found": { "type": "boolean" }, "value": {} }), &["found"]),
        ),
        (
            "delete",
            "Forgets what was kept under a key.",
            Effect::Write,
            scoped(keyed(), &["key"]),
            answer(json!({ "deleted": { "type": "boolean" } }), &["deleted"]),
        ),
        (
            "list",
            "Lists the keys under which values are kept.",
            Effect::Read,
            scoped(list_arguments, &[]),
            answer(
                json!({
                    "entries": { "type": "array", "items": { "type": "object" } },
                    "truncated": { "type": "boolean" },
                }),
                &["entries", "truncated"],
            ),
        ),
    ];
    let work = |name: &str| {
        let stash = Arc::clone(stash);
        match name {
            "put" => Work::in_place(move |caller, arguments| stash.put(caller, arguments)),
            "get" => Work::in_place(move |caller, arguments| stash.get(caller, arguments)),
            "delete" => Work::in_place(move |caller, arguments| stash.delete(caller, arguments)),
            _ => Work::in_place(move |caller, arguments| stash.list(caller, arguments)),
        }
    };
    schemas
        .into_iter()
        .map(|(name, description, effect, input_schema, output_schema)| Plan {
            server: "stash",
            name,
            description: description.to_owned(),
            effect,
            input_schema,
            output_schema,
            work: work(name),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stash whose clock stands until it is moved.
    struct Desk {
        stash: Stash,
        now: Arc<Mutex<Instant>>,
    }

    impl Desk {
        fn new() -> Self {
            let now = Arc::new(Mutex::new(Instant::now()));
            let clock = Arc::clone(&now);
            let terms = Terms {
                lifetime: Duration::from_secs(60),
                entries_max: 3,
                bytes_max: 2_000,
                total_bytes_max: 3_000,
                groups: BTreeMap::from([(
                    "team".to_owned(),
                    BTreeSet::from(["alice".to_owned(), "bob".to_owned()]),
                )]),
            };
            Self { stash: Stash::new(terms, Box::new(move || *clock.lock().unwrap())), now }
        }

        fn pass(&self, seconds: u64) {
            *self.now.lock().unwrap() += Duration::from_secs(seconds);
        }

        fn put(&self, caller: &Caller, arguments: Value) -> Result<Value, &'static str> {
            self.stash.put(caller, arguments.as_object().unwrap()).map_err(|failure| failure.code)
        }

        fn get(&self, caller: &Caller, arguments: Value) -> Result<Value, &'static str> {
            self.stash.get(caller, arguments.as_object().unwrap()).map_err(|failure| failure.code)
        }

        fn has(&self, caller: &Caller, key: &str) -> bool {
            self.get(caller, json!({ "key": key })).unwrap()["found"] == true
        }

        fn keys(&self, caller: &Caller, prefix: &str) -> Vec<String> {
            let arguments = json!({ "prefix": prefix });
            let listed = self.stash.list(caller, arguments.as_object().unwrap()).unwrap();
            let entries = listed["entries"].as_array().unwrap();
            entries.iter().map(|entry| entry["key"].as_str().unwrap().to_owned()).collect()
        }

        /// The sums that are kept are those of what is there.
        fn audit(&self) {
            let held = self.stash.held.lock().unwrap();
            let mut total = 0;
            let mut count = 0;
            for shelf in held.shelves.values() {
                let bytes: usize =
                    shelf.entries.iter().map(|(key, entry)| entry_bytes(key, &entry.value)).sum();
                assert_eq!(bytes, shelf.bytes);
                assert!(!shelf.entries.is_empty());
                total += bytes;
                count += shelf.entries.len();
            }
            assert_eq!((total, count), (held.bytes, held.ends.len()));
            assert_eq!(held.bytes_of.values().sum::<usize>(), total);
        }
    }

    fn caller(principal: &str, session: Option<&str>, run: u8) -> Caller {
        Caller {
            principal: principal.into(),
            run: RunId([run; 16]),
            session: session.map(Into::into),
            deadline: tokio::time::Instant::now(),
            grant: crate::grant::tests::granting_nothing(),
        }
    }

    #[test]
    fn runs_of_one_session_share_and_nobody_else_does() {
        let desk = Desk::new();
        let alice = caller("alice", Some("s"), 1);
        desk.put(&alice, json!({ "key": "k", "value": { "a": [1, null] } })).unwrap();
        let got = desk.get(&caller("alice", Some("s"), 2), json!({ "key": "k" })).unwrap();
        assert_eq!(got, json!({ "found": true, "value": { "a": [1, null] } }));
        for other in
            [caller("alice", Some("t"), 1), caller("bob", Some("s"), 1), caller("alice", None, 1)]
        {
            assert!(!desk.has(&other, "k"), "{other:?}");
            assert_eq!(desk.keys(&other, ""), Vec::<String>::new());
            let deleted = desk.stash.delete(&other, json!({ "key": "k" }).as_object().unwrap());
            assert_eq!(deleted.unwrap(), json!({ "deleted": false }));
        }
        assert!(desk.has(&alice, "k"));
        desk.audit();
    }

    #[test]
    fn without_a_session_a_run_is_alone_even_from_runs_of_its_number() {
        let desk = Desk::new();
        desk.put(&caller("alice", None, 1), json!({ "key": "k", "value": 1 })).unwrap();
        assert!(desk.has(&caller("alice", None, 1), "k"));
        assert!(!desk.has(&caller("alice", None, 2), "k"));
        assert!(!desk.has(&caller("bob", None, 1), "k"));
    }

    #[test]
    fn a_group_is_shared_by_its_members_and_closed_to_others() {
        let desk = Desk::new();
        let entry = json!({ "key": "k", "value": 7, "group": "team" });
        desk.put(&caller("alice", Some("s"), 1), entry.clone()).unwrap();
        let got = desk.get(&caller("bob", None, 9), json!({ "key": "k", "group": "team" }));
        assert_eq!(got.unwrap()["value"], 7);
        assert!(!desk.has(&caller("bob", None, 9), "k"), "a group's is not one's own");
        assert_eq!(desk.put(&caller("eve", Some("s"), 1), entry.clone()), Err("not_allowed"));
        let elsewhere = json!({ "key": "k", "value": 7, "group": "none" });
        assert_eq!(desk.put(&caller("alice", None, 1), elsewhere), Err("not_allowed"));
    }

    #[test]
    fn an_entry_ends_with_its_time_and_nobody_lives_longer_than_the_operator_says() {
        let desk = Desk::new();
        let alice = caller("alice", None, 1);
        desk.put(&alice, json!({ "key": "short", "value": 1, "ttl_s": 10 })).unwrap();
        for (written, seconds) in [("5.0", 5), ("1e1", 10), ("1e30", 60)] {
            let ttl_s: Value = serde_json::from_str(written).unwrap();
            let put = desk.put(&alice, json!({ "key": "float", "value": 1, "ttl_s": ttl_s }));
            assert_eq!(put.unwrap()["expires_in_s"], seconds, "{written}");
        }
        let deleted = desk.stash.delete(&alice, json!({ "key": "float" }).as_object().unwrap());
        assert_eq!(deleted.unwrap(), json!({ "deleted": true }));
        let long = desk.put(&alice, json!({ "key": "long", "value": 1, "ttl_s": u64::MAX }));
        assert_eq!(long.unwrap(), json!({ "expires_in_s": 60 }));
        desk.pass(9);
        assert!(desk.has(&alice, "short"));
        desk.pass(1);
        assert!(!desk.has(&alice, "short"));
        // Put again, it begins again.
        desk.put(&alice, json!({ "key": "long", "value": 2 })).unwrap();
        desk.pass(59);
        assert!(desk.has(&alice, "long"));
        desk.pass(1);
        assert!(!desk.has(&alice, "long"));
        desk.audit();
        assert_eq!(desk.stash.held.lock().unwrap().bytes, 0);
    }

    #[test]
    fn what_a_run_kept_for_itself_ends_with_it_and_nothing_else_does() {
        let desk = Desk::new();
        let (alone, other) = (caller("alice", None, 1), caller("alice", None, 2));
        let in_session = caller("alice", Some("s"), 1);
        for caller in [&alone, &other, &in_session] {
            desk.put(caller, json!({ "key": "k", "value": 1 })).unwrap();
        }
        desk.put(&alone, json!({ "key": "k", "value": 1, "group": "team" })).unwrap();
        desk.stash.forget_run(&alone);
        desk.stash.forget_run(&in_session);
        assert!(!desk.has(&alone, "k"));
        assert!(desk.has(&other, "k") && desk.has(&in_session, "k"));
        let group = json!({ "key": "k", "group": "team" });
        assert_eq!(desk.get(&other, group).unwrap()["found"], true);
        desk.audit();
    }

    #[test]
    fn one_principal_does_not_fill_the_stash_for_others() {
        let desk = Desk::new();
        let put = |principal: &str, run: u8, group: bool| {
            let mut entry = json!({ "key": format!("{run}"), "value": "x".repeat(600) });
            if group {
                entry["group"] = "team".into();
            }
            desk.put(&caller(principal, None, run), entry)
        };
        // Whichever run it is, and in a group as well.
        put("alice", 1, false).unwrap();
        put("alice", 2, true).unwrap();
        assert_eq!(put("alice", 3, false), Err("full"));
        assert_eq!(put("alice", 3, true), Err("full"));
        // What takes the place of another's is one's own from there on.
        put("bob", 2, true).unwrap();
        put("alice", 3, false).unwrap();
        desk.audit();
    }

    #[test]
    fn a_full_stash_refuses_and_keeps_what_it_has() {
        let desk = Desk::new();
        let alice = caller("alice", None, 1);
        for key in ["a", "b", "c"] {
            desk.put(&alice, json!({ "key": key, "value": 1 })).unwrap();
        }
        assert_eq!(desk.put(&alice, json!({ "key": "d", "value": 1 })), Err("full"));
        desk.put(&alice, json!({ "key": "c", "value": 2 })).unwrap();
        assert_eq!(desk.keys(&alice, ""), ["a", "b", "c"]);

        let bob = caller("bob", None, 1);
        let long = "x".repeat(2_000);
        assert_eq!(desk.put(&bob, json!({ "key": "k", "value": long })), Err("full"));
        desk.put(&bob, json!({ "key": "k", "value": "x".repeat(1_500) })).unwrap();
        assert_eq!(desk.put(&bob, json!({ "key": "k", "value": long })), Err("full"));
        assert!(desk.has(&bob, "k"), "what is there stays if its successor has no room");
        // Alone it would fit; together with the others' it does not.
        let eve = caller("eve", None, 1);
        assert_eq!(desk.put(&eve, json!({ "key": "k", "value": "x".repeat(700) })), Err("full"));
        desk.pass(60);
        desk.put(&eve, json!({ "key": "k", "value": "x".repeat(700) })).unwrap();
        desk.audit();
    }

    #[test]
    fn a_list_is_by_prefix_and_a_deleted_key_is_gone() {
        let desk = Desk::new();
        let alice = caller("alice", None, 1);
        for key in ["a/1", "a/2", "b"] {
            desk.put(&alice, json!({ "key": key, "value": 1 })).unwrap();
        }
        assert_eq!(desk.keys(&alice, "a/"), ["a/1", "a/2"]);
        let deleted = desk.stash.delete(&alice, json!({ "key": "a/1" }).as_object().unwrap());
        assert_eq!(deleted.unwrap(), json!({ "deleted": true }));
        assert_eq!(desk.keys(&alice, "a/"), ["a/2"]);
        desk.audit();
    }

    #[test]
    fn a_key_is_bounded_in_bytes() {
        let desk = Desk::new();
        let alice = caller("alice", None, 1);
        for key in ["", &"é".repeat(129)] {
            assert_eq!(desk.put(&alice, json!({ "key": key, "value": 1 })), Err("bad_request"));
        }
    }
}
