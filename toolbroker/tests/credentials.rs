//! Where credentials come from, over the real process: each source reaches
//! the one variable of the one server that it is declared for, and nothing
//! else anywhere.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use forge_protocol::limits::RunLimits;
use serde_json::json;
use support::{Broker, CANARY, test_server};

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

fn private(folder: &Path, name: &str, text: &str, mode: u32) -> String {
    let file = folder.join(name);
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    file.display().to_string()
}

/// An age file of the canary and its identity.
fn encrypted(folder: &Path) -> (String, String) {
    use age::secrecy::ExposeSecret as _;
    let identity = age::x25519::Identity::generate();
    let to = identity.to_public();
    let recipients = std::iter::once(&to as &dyn age::Recipient);
    let mut bytes = Vec::new();
    let mut writer =
        age::Encryptor::with_recipients(recipients).unwrap().wrap_output(&mut bytes).unwrap();
    writer.write_all(CANARY.as_bytes()).unwrap();
    writer.finish().unwrap();
    let file = folder.join("token.age");
    std::fs::write(&file, bytes).unwrap();
    let identity = private(folder, "identity", identity.to_string().expose_secret(), 0o600);
    (file.display().to_string(), identity)
}

fn configured(folder: &tempfile::TempDir, source: &str) -> String {
    let text = format!(
        "[servers.own]\ncommand = {server:?}\nargs = [\"--hostile\"]\n\
         [servers.own.credentials]\nTEST_TOKEN = {source}\n\
         [servers.other]\ncommand = {server:?}\nargs = [\"--hostile\"]\n",
        server = test_server().display().to_string(),
    );
    private(folder.path(), "forge.toml", &text, 0o600)
}

fn start(folder: tempfile::TempDir, source: &str) -> Broker {
    let config = configured(&folder, source);
    let mut broker = Broker::spawn(folder, &["--config".into(), config]);
    broker.say_hello();
    broker
}

#[test]
fn each_source_reaches_its_own_servers_variable_and_nothing_else() {
    for kind in ["from_env", "file", "age", "command"] {
        let folder = tempfile::tempdir().unwrap();
        let source = match kind {
            "from_env" => "{ from_env = \"CANARY\" }".to_owned(),
            "file" => {
                let file = private(folder.path(), "token", &format!("{CANARY}\n"), 0o600);
                format!("{{ file = {file:?} }}")
            }
            "age" => {
                let (file, identity) = encrypted(folder.path());
                format!("{{ age = {file:?}, identity = {identity:?} }}")
            }
            _ => {
                let file = private(folder.path(), "told", &format!("{CANARY}\n"), 0o600);
                format!("{{ command = [\"cat\", {file:?}] }}")
            }
        };
        let mut broker = start(folder, &source);
        let mut worker = broker.run(&["own.echo_env", "own.spell", "other.echo_env"], limits());
        let (_, own) = worker.call("own.echo_env", &json!({}));
        assert_eq!(own["variables"]["TEST_TOKEN"], "[credential removed]", "{kind}");
        // It is the whole value and nothing but it.
        let (_, spelled) = worker.call("own.spell", &json!({"how": "hex"}));
        assert_eq!(spelled[0]["text"], "[credential removed]", "{kind}");
        let (_, other) = worker.call("other.echo_env", &json!({}));
        let other = other["variables"].as_object().unwrap();
        assert!(!other.contains_key("TEST_TOKEN") && !other.contains_key("CANARY"), "{kind}");
        drop(worker);
        let (status, log) = broker.finish();
        assert!(status.success());
        assert!(!log.contains(CANARY), "{kind}: {log}");
    }
}

#[test]
fn attack_24_a_bad_source_ends_the_broker_with_2_and_names_the_field_and_never_the_value() {
    let file = |mode| {
        move |folder: &Path| {
            let file = private(folder, "token", CANARY, mode);
            format!("{{ file = {file:?} }}")
        }
    };
    type Table<'a> = &'a dyn Fn(&Path) -> String;
    let cases: [(Table<'_>, &str); 7] = [
        (&file(0o644), "chmod 600"),
        (&file(0o660), "chmod 600"),
        (&|_| "{ file = \"/nonexistent/token\" }".into(), "cannot read /nonexistent/token"),
        (&|_| "{ from_env = \"NOT_SET_ANYWHERE\" }".into(), "NOT_SET_ANYWHERE is not set"),
        (&|_| format!("{{ command = [\"sh\", \"-c\", \"echo {CANARY}; exit 1\"] }}"), "ended with"),
        (&|_| format!("{{ value = \"{CANARY}\" }}"), "TEST_TOKEN.value"),
        (
            &|folder| {
                let (file, _) = encrypted(folder);
                let identity = private(folder, "other", CANARY, 0o600);
                format!("{{ age = {file:?}, identity = {identity:?} }}")
            },
            "age-keygen",
        ),
    ];
    for (source, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let config = configured(&folder, &source(folder.path()));
        let mut broker = Broker::spawn(folder, &["--config".into(), config]);
        assert_eq!(support::wait(&mut broker.child).code(), Some(2), "{expected}");
        let (_, log) = broker.finish();
        assert!(log.contains("servers.own.credentials.TEST_TOKEN"), "{log}");
        assert!(log.contains(expected), "{expected}: {log}");
        assert!(!log.contains(CANARY), "{log}");
    }
}

#[test]
fn a_credential_file_of_another_user_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = private(folder.path(), "token", CANARY, 0o600);
    if rustix::fs::chown(&*file, Some(rustix::fs::Uid::from_raw(64_123)), None).is_err() {
        eprintln!("SKIPPED: only root can give a file away");
        return;
    }
    let config = configured(&folder, &format!("{{ file = {file:?} }}"));
    let mut broker = Broker::spawn(folder, &["--config".into(), config]);
    assert_eq!(support::wait(&mut broker.child).code(), Some(2));
    let (_, log) = broker.finish();
    assert!(log.contains("belongs to uid 64123"), "{log}");
}
