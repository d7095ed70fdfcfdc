//! `forge-vmm config`: what it prints is complete and good, and what is wrong
//! with a file is told whole, without starting anything.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/executables.rs"]
mod executables;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use executables::FORGE;
use forge_protocol::signature::SignerKey;
use serde_json::Value as Json;
use toml::{Table, Value};

/// Tables whose keys are names of the operator's choice; `*` is any key.
const NAMED: [&str; 12] = [
    "servers",
    "servers.*.env",
    "servers.*.credentials",
    "servers.*.headers",
    "tools",
    "roles",
    "principals",
    "builtins.crypto.keys",
    "builtins.http.allow.*.headers",
    "builtins.stash.groups",
    "",
    "vm",
];

/// Keys that stand in a sentence and not in a setting: what excludes them does.
const IN_WORDS: [&str; 2] = ["http.principal", "http.mode"];

/// A folder, gone after the test.
struct Desk(PathBuf);

impl Desk {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        executables::folder();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("forge-config-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, text: &[u8]) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn forge(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(FORGE);
        for name in ["INVENTORY_TOKEN", "WIKI_TOKEN", "PARTS_SECRET", "API_TOKEN"] {
            command.env(name, "a-credential-for-tests");
        }
        command.current_dir(&self.0).args(arguments).output().unwrap()
    }

    /// What `config check --json` tells of this file, and its exit status.
    fn check(&self, text: &str) -> (Vec<(String, String)>, i32) {
        self.write("forge.toml", text.as_bytes());
        let output = self.forge(&["config", "check", "--json"]);
        let told: Vec<Json> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
        let faults = told.iter().map(|it| (text(&it["field"]), text(&it["problem"]))).collect();
        (faults, output.status.code().unwrap())
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn printed(desk: &Desk) -> String {
    let output = desk.forge(&["config", "init"]);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Every setting is one: a `#` and no blank after it.
fn uncommented(text: &str) -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(rest) if !rest.starts_with([' ', '#']) => rest.to_owned(),
        _ => line.to_owned(),
    };
    text.lines().map(|it| line(it) + "\n").collect()
}

/// The same, naming files that are there, and users that need no root.
fn on_this_host(desk: &Desk, text: &str) -> String {
    let signer = SignerKey::from_secret(&[7; 32]);
    fs::write(desk.path("signer.pub"), signer.trust_key().to_pem()).unwrap();
    desk.write("alice.pem", signer.to_pem().as_bytes());
    for name in ["db-password", "crm-secret", "webhook-key"] {
        desk.write(name, b"a-credential-for-tests");
    }
    let document = serde_json::json!({"openapi": "3.1.0", "paths": {"/parts/{id}": {
        "parameters": [{"name": "id", "in": "path", "schema": {}}],
        "get": {"operationId": "getPart"}}}});
    desk.write("parts.json", document.to_string().as_bytes());
    let here = desk.0.to_str().unwrap();
    text.replace("/etc/forge-vmm", here).replace("/srv/reports", here).lines().fold(
        String::new(),
        |mut text, line| {
            let is_elsewhere = line.starts_with("user = ")
                || line.starts_with("ca_file = ")
                || line.starts_with("API_KEY = ");
            if !is_elsewhere {
                text.push_str(line);
                text.push('\n');
            }
            text
        },
    )
}

/// Every table of a document, by its way with `*` for names and positions.
fn tables(value: &mut Value, at: &str, found: &mut dyn FnMut(&str, &mut Table)) {
    let below = |key: &str| if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
    match value {
        Value::Table(table) => {
            let is_named = NAMED.contains(&at) && !["", "vm"].contains(&at);
            for (key, value) in table.iter_mut() {
                tables(value, &below(if is_named { "*" } else { key }), found);
            }
            found(at, table);
        }
        Value::Array(items) => items.iter_mut().for_each(|it| tables(it, &below("*"), found)),
        _ => {}
    }
}

#[test]
fn the_printed_configuration_is_commented_whole_and_good_as_it_is_and_uncommented() {
    let desk = Desk::new();
    let text = printed(&desk);
    assert!(text.lines().all(|line| line.is_empty() || line.starts_with('#')));
    assert_eq!(desk.check(&text), (vec![], 0));
    let whole = on_this_host(&desk, &uncommented(&text));
    assert_eq!(desk.check(&whole), (vec![], 0), "{whole}");
}

#[test]
fn every_key_that_a_parser_knows_is_in_the_printed_configuration() {
    let desk = Desk::new();
    let written: Value = Value::Table(uncommented(&printed(&desk)).parse().unwrap());
    let mut asked: Value =
        Value::Table(on_this_host(&desk, &uncommented(&printed(&desk))).parse().unwrap());
    let mut keys: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    tables(&mut written.clone(), "", &mut |at, table| {
        keys.entry(at.to_owned()).or_default().extend(table.keys().cloned());
    });
    // A key that nobody knows, in every table: whoever reads it says what it
    // knows.
    const UNKNOWN: &str = "nobody-knows-this";
    let mut expected = BTreeSet::new();
    tables(&mut asked, "", &mut |at, table| {
        if !NAMED.contains(&at) {
            expected.insert(at.to_owned());
            table.insert(UNKNOWN.into(), Value::Integer(1));
        }
    });
    let Value::Table(top) = &mut asked else { panic!("a table") };
    top.insert(UNKNOWN.into(), Value::Integer(1));
    if let Some(Value::Table(vm)) = top.get_mut("vm") {
        vm.insert(UNKNOWN.into(), Value::Integer(1));
    }
    expected.extend([String::new(), "vm".into()]);
    let (faults, status) = desk.check(&written_out(&asked));
    assert_eq!(status, 2);
    let mut told = BTreeSet::new();
    for (field, problem) in &faults {
        let Some((_, known)) = problem.split_once("known here are ") else {
            panic!("{field}: {problem}")
        };
        let way = field.strip_suffix(UNKNOWN).unwrap_or_else(|| panic!("{field}: {problem}"));
        let at = general(way.trim_end_matches('.'));
        // A credential comes from one place, wherever it is needed.
        let is_credential = known.contains("from_env");
        for key in known.split(", ") {
            let full = format!("{at}.{key}");
            let full = full.trim_start_matches('.');
            assert!(
                keys[&at].contains(key)
                    || is_credential && keys["servers.*.credentials.*"].contains(key)
                    || IN_WORDS.contains(&full),
                "{full} is not in commented.toml"
            );
        }
        told.insert(at);
    }
    assert_eq!(told, expected, "who does not say what it knows");
}

/// A document, a line for each key at its top.
fn written_out(document: &Value) -> String {
    fn value(of: &Value) -> String {
        match of {
            Value::Table(table) => {
                let fields = table.iter().map(|(key, it)| format!("{key:?} = {}", value(it)));
                format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
            }
            Value::Array(items) => {
                format!("[{}]", items.iter().map(value).collect::<Vec<_>>().join(", "))
            }
            Value::String(text) => serde_json::to_string(text).unwrap(),
            Value::Integer(number) => number.to_string(),
            Value::Boolean(flag) => flag.to_string(),
            other => panic!("{other:?}"),
        }
    }
    let Value::Table(top) = document else { panic!("a table") };
    top.iter().map(|(key, it)| format!("{key:?} = {}\n", value(it))).collect()
}

/// A field's way with `*` for names and positions.
fn general(way: &str) -> String {
    let mut at = String::new();
    let mut rest = way;
    while !rest.is_empty() {
        let is_named = NAMED.contains(&at.as_str()) && !at.is_empty() && at != "vm";
        // Of all names here only a tool's has a dot.
        let key = if at == "tools" { rest } else { rest.split('.').next().unwrap() };
        rest = rest[key.len()..].trim_start_matches('.');
        let is_position = key.bytes().all(|byte| byte.is_ascii_digit());
        if !at.is_empty() {
            at.push('.');
        }
        at.push_str(if is_named || is_position { "*" } else { key });
    }
    at
}

#[test]
fn everything_wrong_is_told_at_once_by_field_and_nothing_is_started() {
    let desk = Desk::new();
    let mark = desk.path("started");
    let mark = mark.display();
    let (faults, status) = desk.check(&format!(
        "[trust]\nkeys = ['nowhere.pub']\n[service]\nruns_max = 0\nmode = '0777'\nqueue = 1\n\
         [pool]\nready = 'hunter2'\nreuse = 'hunter2'\n[http]\nlisten = 'hunter2'\nprincipal = 'a'\n\
         [principals.p]\nuid = 7\nruns_max = 0\ntoken_sha256 = ['hunter2']\n\
         [servers.a]\ncommand = '/usr/bin/touch'\nargs = ['{mark}']\nargz = 1\n\
         [servers.a.credentials]\nK = {{ command = ['/usr/bin/touch', '{mark}'] }}\n\
         L = {{ from_env = 'NOT_SET_ANYWHERE' }}\n[tools.'a.b']\ncost = -1\n"
    ));
    assert_eq!(status, 2);
    let fields: BTreeSet<&str> = faults.iter().map(|(field, _)| field.as_str()).collect();
    for field in [
        "trust.keys.0",
        "service.queue",
        "service.runs_max",
        "service.mode",
        "pool.ready",
        "pool.reuse",
        "http.listen",
        "principals.p.uid",
        "principals.p.runs_max",
        "principals.p.token_sha256",
        "servers.a.argz",
        "servers.a.credentials.L",
        "tools.a.b.cost",
    ] {
        assert!(fields.contains(field), "{field}: {faults:#?}");
    }
    assert_eq!(fields.len(), faults.len(), "one line for each: {faults:#?}");
    assert!(!format!("{faults:?}").contains("hunter2"), "{faults:#?}");
    assert!(!Path::new(&mark.to_string()).exists());
}

#[test]
fn what_two_tables_say_together_is_checked_as_a_service_takes_it() {
    let desk = Desk::new();
    let key = SignerKey::from_secret(&[7; 32]).trust_key();
    desk.write("signer.pub", key.to_pem().as_bytes());
    fs::create_dir(desk.path("w")).unwrap();
    for (text, field, served) in [
        ("[vm]\nisolation = 'process'\n[pool]\nreuse = 'reset'\n", "pool.reuse", "[pool] reuse"),
        ("[http]\nlisten = './w/../w/s'\nprincipal = 'local'\n", "http.listen", "[service] socket"),
    ] {
        let text = format!("[trust]\nkeys = ['signer.pub']\n[service]\nsocket = 'w/s'\n{text}");
        let (faults, status) = desk.check(&text);
        assert_eq!((faults.len(), status), (1, 2), "{faults:?}");
        assert_eq!(faults[0].0, field);
        let refused = desk.forge(&["serve", "--config", "forge.toml"]);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && said.contains(served), "{said}");
    }
}

#[test]
fn a_configuration_from_a_pipe_is_refused_before_it_is_read() {
    let desk = Desk::new();
    let pipe = std::ffi::CString::new(desk.path("pipe").into_os_string().into_encoded_bytes());
    // SAFETY: a plain system call on a text that ends.
    assert_eq!(unsafe { libc::mkfifo(pipe.unwrap().as_ptr(), 0o600) }, 0);
    for command in [
        &["config", "check", "--config", "pipe"][..],
        &["tools", "list", "--config", "pipe"],
        &["tools", "list", "--mcp-config", "pipe"],
    ] {
        let refused = desk.forge(command);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains("pipe: this is a pipe") && said.contains("give a file"), "{said}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_told_as_json_too() {
    let desk = Desk::new();
    let output = desk.forge(&["config", "check", "--json", "--config", "nowhere.toml"]);
    assert_eq!(output.status.code(), Some(2));
    let told: Vec<Json> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told.len(), 1);
    assert!(told[0]["problem"].as_str().unwrap().contains("No such file"), "{told:?}");
}

#[test]
fn a_person_reads_file_field_and_reason_and_the_status_is_that_of_a_wrong_configuration() {
    let desk = Desk::new();
    desk.write("forge.toml", b"[service]\nrun_max = 3\n");
    let output = desk.forge(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2));
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(
        told.starts_with("forge.toml:2: service.run_max: unknown field; known here are socket")
    );
    // As the service itself would.
    let served = desk.forge(&["serve", "--config", "forge.toml"]);
    assert_eq!(served.status.code(), Some(2));
    let said = String::from_utf8(served.stderr).unwrap();
    assert!(said.contains("forge.toml:2: service.run_max: unknown field"), "{said}");
    let absent = desk.forge(&["config", "check", "--config", "nowhere.toml"]);
    assert_eq!(absent.status.code(), Some(2));
    fs::remove_file(desk.path("forge.toml")).unwrap();
    let absent = desk.forge(&["config", "check"]);
    assert_eq!(absent.status.code(), Some(2));
    let said = String::from_utf8(absent.stderr).unwrap();
    assert!(said.contains("`forge-vmm config init` prints one"), "{said}");
    desk.write("forge.toml", b"");
    assert_eq!(desk.forge(&["config", "check"]).stdout, b"forge.toml: good\n");
}

/// What a person reads of this file.
fn told(desk: &Desk, text: impl AsRef<[u8]>) -> String {
    desk.write("forge.toml", text.as_ref());
    let output = desk.forge(&["config", "check"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

#[test]
fn faults_are_told_in_the_order_of_their_lines_and_known_fields_once() {
    let desk = Desk::new();
    let text = told(
        &desk,
        "[pool]\nreddy = 1\n[servers.a]\ncomand = 'x'\n[service]\nrun_max = 1\n\
         [tools.'a.b']\ncost = -1\n",
    );
    let lines: Vec<&str> = text.lines().filter_map(|line| line.split(": ").next()).collect();
    assert_eq!(lines, ["forge.toml:2", "forge.toml:4", "forge.toml:6", "forge.toml:8"], "{text}");
    let (_, known) = text.lines().nth(1).unwrap().split_once("known here are ").unwrap();
    let known: Vec<&str> = known.split(", ").collect();
    assert_eq!(known.len(), BTreeSet::from_iter(&known).len(), "{known:?}");
    let text = told(&desk, r#"{"mcpServers": {}}"#);
    assert!(text.contains("forge.toml:1: this is JSON") && text.contains("--mcp-config"), "{text}");
}

#[test]
fn each_fault_is_told_with_its_line() {
    let desk = Desk::new();
    let text = told(
        &desk,
        "# a\n[service]\nruns_max = 'x'\n[tools]\n'a.b' = { cost = -1 }\n[service.vsock]\n\
         cid = 1\n[builtins.http]\nallow = [\n  { host = 'a' },\n  { host = 'a:1' },\n]\n",
    );
    let lines: BTreeSet<&str> = text.lines().filter_map(|line| line.split(": ").next()).collect();
    // Of what is missing, the table in which it is.
    let expected = ["forge.toml:11", "forge.toml:3", "forge.toml:5", "forge.toml:6"];
    assert_eq!(lines, BTreeSet::from(expected), "{text}");
    desk.write("forge.toml", b"\n[service]\nruns_max = 0\n");
    let output = desk.forge(&["config", "check", "--json"]);
    let faults: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(faults[0]["line"], 3, "{faults}");
    // Whose value is of no use is told so by a command that needs it, too.
    let served = desk.forge(&["mcp", "--config", "forge.toml"]);
    let said = String::from_utf8(served.stderr).unwrap();
    assert!(said.contains("forge.toml:3: service.runs_max: must be 1"), "{said}");
}

#[test]
fn the_usual_mistakes_of_syntax_are_told_in_words_and_without_the_line() {
    let desk = Desk::new();
    for (text, said) in [
        (&b"[service]\nruns_max = 1\nruns_max = 2\n"[..], "forge.toml:3: this key or table stands"),
        (b"[pool]\nready = 1\n[pool]\nready = 2\n", "forge.toml:3: this key or table stands"),
        (
            b"[service]\nsocket = hunter2\n",
            "forge.toml:2: this is not TOML here: a text has quotes",
        ),
        (b"[service]\nsocket = 'hunter2\n", "forge.toml:2: this is not TOML here"),
        (b"[pool\nready = 1\n", "forge.toml:1: this is not TOML here: close the bracket"),
        (b"a = = 1\n", "forge.toml:1: this is not TOML here: there is one `=` too many"),
        (b"[service]\nhunter2\n", "forge.toml:2: this is not TOML here: `=` and a value"),
        (b"a = [1, 2\n", "this is not TOML here: close the bracket"),
        (b"a = ['x' 'y']\n", "forge.toml:1: this is not TOML here: a comma is missing"),
        (b"\n[service]\nsocket = '\xff'\n", "forge.toml:3: this is no UTF-8 text"),
    ] {
        let told = told(&desk, text);
        assert!(told.contains(said), "{told}, not {said}");
        assert!(!told.contains("hunter2"), "{told}");
    }
}

#[test]
fn a_list_where_a_table_belongs_is_told_as_one_and_not_read_as_its_fields() {
    let desk = Desk::new();
    for text in ["pool = [2, 4]", "[[pool]]\nready = 1\n", "[[service]]\nruns_max = 1\n"] {
        let told = told(&desk, text);
        assert!(told.contains(": expected a table, found a list: [[…]] begins one"), "{told}");
    }
    let nested = told(&desk, "[[service.vsock]]\nport = 5000\n");
    assert!(nested.contains("service.vsock: expected ") && nested.contains("table"), "{nested}");
}

#[test]
fn a_name_that_no_request_can_have_is_refused_with_its_entry_and_what_to_write() {
    let desk = Desk::new();
    let door = "[http]\nlisten = '127.0.0.1:8080'\nprincipal = 'local'\n";
    let good = "hosts = ['forge.example', '192.0.2.7', '[::1]']\n";
    assert_eq!(desk.check(&format!("{door}{good}")), (vec![], 0));
    let good = "[mcp]\nhosts = ['forge.example:8443']\norigins = ['https://a.example:*', 'null']\n";
    assert_eq!(desk.check(good), (vec![], 0));
    for (text, field, why) in [
        ("hosts = ['a', 'https://hunter2']", "http.hosts.1", "a scheme: write the name alone"),
        ("hosts = ['hunter2:8080']", "http.hosts.0", "a port: leave it out"),
        ("hosts = ['hunter2/a']", "http.hosts.0", "a path: write the name alone"),
        ("hosts = ['*.hunter2']", "http.hosts.0", "a *, and nothing stands for several names"),
        ("hosts = ['hunter2 ']", "http.hosts.0", "is no host's name"),
        ("[mcp]\nhosts = ['https://hunter2']", "mcp.hosts.0", "a scheme"),
        ("[mcp]\norigins = ['hunter2']", "mcp.origins.0", "https://app.example"),
        ("[mcp]\norigins = ['https://*.hunter2']", "mcp.origins.0", "stands for any port alone"),
    ] {
        let (faults, status) = desk.check(&format!("{door}{text}\n"));
        assert_eq!((faults.len(), status), (1, 2), "{text}: {faults:?}");
        assert_eq!(faults[0].0, field);
        assert!(faults[0].1.contains(why) && !faults[0].1.contains("hunter2"), "{faults:?}");
    }
    // As the doors themselves would.
    desk.write("forge.toml", b"[mcp]\nhosts = ['*.example']\n");
    let refused = desk.forge(&["mcp", "--config", "forge.toml"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("forge.toml:2: mcp.hosts.0: has a *")
    );
}

#[test]
fn a_limit_of_all_vms_that_no_kernel_could_keep_is_refused_with_its_bounds() {
    let desk = Desk::new();
    let group = |limit: &str| format!("[vm.group]\n{limit}\n");
    for good in [
        "memory_bytes = 1048576",
        "processes = 1",
        "processes = 4194304",
        "cpu_thousandths = 10",
        "cpu_thousandths = 8192000",
    ] {
        assert_eq!(desk.check(&group(good)), (vec![], 0), "{good}");
    }
    for (key, wrong, bounds) in [
        ("memory_bytes", ["0", "1048575", "9223372036854775807"], "1048576 to 1125899906842624"),
        ("processes", ["0", "4194305", "9223372036854775807"], "1 to 4194304"),
        ("cpu_thousandths", ["0", "9", "9223372036854775807"], "10 to 8192000"),
    ] {
        for value in wrong {
            let (faults, status) = desk.check(&group(&format!("{key} = {value}")));
            let told = (format!("vm.group.{key}"), format!("must be from {bounds}"));
            assert_eq!((faults, status), (vec![told], 2), "{value}");
        }
    }
    // As the commands themselves would.
    desk.write("forge.toml", group("cpu_thousandths = 9223372036854775807").as_bytes());
    let refused = desk.forge(&["mcp", "--config", "forge.toml"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("forge.toml:2: vm.group.cpu_thousandths: must be from 10"), "{said}");
}

#[test]
fn a_principals_role_that_nobody_wrote_down_is_told() {
    let desk = Desk::new();
    let text = "[roles.reader]\ntools = ['shop.*']\n[principals.a]\nroles = ['writer']\n";
    let (faults, status) = desk.check(text);
    assert_eq!((faults.len(), status), (1, 2), "{faults:?}");
    assert_eq!(faults[0].0, "principals.a.roles.0");
    assert!(faults[0].1.starts_with("no role has this name; known are reader"), "{faults:?}");
}

#[test]
fn a_file_of_tool_servers_is_checked_without_a_configuration() {
    let desk = Desk::new();
    let check = |text: &str| {
        desk.write("mcp.json", text.as_bytes());
        let output = desk.forge(&["config", "check", "--mcp-config", "mcp.json"]);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let good = check(r#"{"mcpServers": {"a": {"command": "/bin/true"}}}"#);
    assert_eq!(good, (Some(0), "mcp.json: good\n".into()));
    let (code, told) =
        check("{\"mcpServers\": {\"a\": {\n\"command\": \"/bin/true\",\n\"argz\": []}}}");
    assert_eq!(code, Some(2));
    assert!(told.starts_with("mcp.json:3: mcpServers.a.argz: unknown field"), "{told}");
    let (code, told) = check("{\"mcpServers\":\n {\"a\": hunter2}}");
    assert_eq!((code, told.as_str()), (Some(2), "mcp.json:2: this is not JSON at column 8\n"));
    // Both are, where both are named.
    let both = ["config", "check", "--config", "forge.toml", "--mcp-config", "mcp.json"];
    let said = String::from_utf8(desk.forge(&both).stderr).unwrap();
    assert!(said.contains("forge.toml"), "{said}");
}
