//! Credentials of several kinds, told by hostile servers in every way they
//! know, and then looked for in all that a run leaves: logs, report, journal,
//! the worker's memory and the guest's. A marker that comes to each of these
//! places by the product's own ways shows that they are looked at.
//!
//! With `FORGE_SCAN=1` a scanner that is not ours (`detect-secrets`, from PyPI)
//! looks at the same files: `toolbroker/tests/secret-scan`.
//!
//! Beside it stand other attacks that need a whole run or the service.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use executables::FORGE;
use processes::{contains, memory_of, wait_for, worker_of};
use serde_json::{Value, json};
use support::{forge_module, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            attack_20_no_credential_is_in_a_log_a_report_a_journal_or_a_memory,
            attack_6_no_spelling_of_a_name_reaches_a_tool_that_is_not_granted,
            attack_26_a_run_whose_journal_cannot_be_written_ends_as_that,
        ],
        claims![attack_17_another_user_cannot_connect_to_the_service],
    )
}

/// One credential: the variable it comes from, and its value. Put together
/// here, so that nobody takes this file for a leak.
struct Credential {
    variable: &'static str,
    value: String,
}

fn credentials() -> Vec<Credential> {
    let new = |variable, value| Credential { variable, value };
    let key = ["-----BEGIN RSA", " PRIVATE KEY-----"].concat();
    vec![
        new("A_GITHUB", format!("{}_{}", "ghp", "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8")),
        new(
            "A_SLACK",
            format!("{}-{}", "xoxb", "263594206564-2343594206574-fGqddMF8t08v8N7Oq4i57vs1"),
        ),
        new("AN_AWS", format!("{}{}", "AKIA", "4QPZ7M2WXN6R8TLC")),
        new("A_STRIPE", format!("{}_live_{}", "sk", "9fJk2LmN8pQr4StUv6WxYz1A")),
        new(
            "A_JWT",
            format!(
                "{}.{}.{}",
                "eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiJmb3JnZSJ9", "x3kR5w8vQm1tYz7LpBn2"
            ),
        ),
        new(
            "A_KEY",
            format!(
                "{key}\nMIIBOgIBAAJBAKj34GkxFhD90vcNLYLInFEX6Ppy1tPf9Cnzj4p4WGeKLs1Pt8Qu\n-----END"
            ),
        ),
    ]
}

/// What comes to all places, and is no credential that the broker knows.
fn marker() -> String {
    format!("{}{}", "AKIA", "3MARKER5MARKER7Q")
}

/// An HTTP interface that says back all that it is told: in its body and in
/// headers, as it is and in base64, in chunks that part it everywhere.
fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|got| got == 1) {
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let told = head
                .lines()
                .find_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    let name = name.to_ascii_lowercase();
                    matches!(name.as_str(), "authorization" | "x-api-key").then_some(value)
                })
                .unwrap_or_default();
            let status = if head.contains("/fail") { "500 No" } else { "200 OK" };
            let body =
                json!({ "told": told, "head": head, "hex": hex(told), "percent": percent(told) });
            let mut answer = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\netag: \"{told}\"\r\n\
                 link: <{}>\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
                percent(told)
            );
            for piece in body.to_string().as_bytes().chunks(7) {
                answer.push_str(&format!(
                    "{:x}\r\n{}\r\n",
                    piece.len(),
                    String::from_utf8_lossy(piece)
                ));
            }
            answer.push_str("0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    port
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn percent(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// The tools that runs are granted, if they call them.
const TOOLS: [&str; 15] = [
    "hub.spell",
    "hub.fail",
    "hub.misfit",
    "hub.echo",
    "hub.echo_env",
    "keyed.spell",
    "keyed.fail",
    "keyed.misfit",
    "raw.nonsense",
    "raw.misfit",
    "names.fine",
    "api.tell",
    "api.fail",
    "resource.read",
    "http.fetch",
];

/// A folder with everything that a run needs and everything that it leaves.
struct Desk {
    folder: PathBuf,
    credentials: Vec<Credential>,
}

impl Desk {
    fn new(name: &str, port: u16) -> Self {
        let folder =
            std::env::temp_dir().join(format!("forge-canary-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let desk = Self { folder, credentials: credentials() };
        fs::write(desk.path("signer.pem"), signer().to_pem()).unwrap();
        fs::set_permissions(desk.path("signer.pem"), fs::Permissions::from_mode(0o600)).unwrap();
        let simple = |id: &str| json!({"get": {"operationId": id}});
        let document = json!({"openapi": "3.0.3", "info": {"title": "Echo", "version": "1"},
            "paths": {"/tell": simple("tell"), "/fail": simple("fail")}});
        fs::write(desk.path("api.json"), document.to_string()).unwrap();
        let server = executables::folder().join("forge-test-server");
        let told = |name: &str, args: &str, variable: &str| {
            format!(
                "[servers.{name}]\ncommand = {server:?}\nargs = [{args}]\n\
                 credentials = {{ TEST_TOKEN = {{ from_env = '{variable}' }} }}\n"
            )
        };
        let config = [
            told("hub", "'--hostile'", "A_GITHUB"),
            told("raw", "'--raw', 'plain'", "A_SLACK"),
            told("names", "'--raw', 'names'", "A_STRIPE"),
            told("keyed", "'--hostile'", "A_KEY"),
            format!(
                "[servers.api]\nopenapi = 'api.json'\nbase_url = 'http://127.0.0.1:{port}/'\n\
                 headers.X-API-Key = {{ from_env = 'AN_AWS' }}\n\
                 [builtins.resource]\nallow = [{{ server = 'hub', uri_prefix = 'test://open/' }}]\n\
                 [[builtins.http.allow]]\nscheme = 'http'\nhost = '127.0.0.1'\nport = {port}\n\
                 addresses = ['127.0.0.1']\n\
                 headers = {{ Authorization = {{ prefix = 'Bearer ', from_env = 'A_JWT' }} }}\n"
            ),
        ];
        fs::write(desk.path("forge.toml"), config.concat()).unwrap();
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Starts a run of these calls; it stays with all answers in its memory,
    /// or ends with them in its output.
    fn start(&self, calls: &[(String, Value)], stays: bool) -> Child {
        fs::write(self.path("program.wat"), program(calls, stays)).unwrap();
        let mut allowed: Vec<&str> = calls.iter().map(|(tool, _)| tool.as_str()).collect();
        // The rest is asked for all the same.
        allowed.retain(|tool| TOOLS.contains(tool));
        allowed.push("hub.never");
        let mut command = Command::new(FORGE);
        command.current_dir(&self.folder).env("FORGE_STATE", self.path("state"));
        command.env("FORGE_LOG", "trace");
        for Credential { variable, value } in &self.credentials {
            command.env(variable, value);
        }
        let file = |name: &str| {
            let name = format!("{name}-{}", if stays { "stays" } else { "ends" });
            fs::File::create(self.path(&name)).unwrap()
        };
        command
            .args(["run", "--json", "--sign-with", "signer.pem", "--timeout", "30s"])
            .args(["--config", "forge.toml"])
            .args(allowed.iter().flat_map(|tool| ["--allow", tool]))
            .arg("program.wat")
            .stdin(Stdio::null())
            .stdout(file("report"))
            .stderr(file("log"))
            .spawn()
            .unwrap()
    }

    fn report(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("report-ends")).unwrap()).unwrap()
    }

    /// Everything that such runs leave, by kind.
    fn left_by(&self, calls: &[(String, Value)]) -> Vec<(&'static str, PathBuf)> {
        let status = self.start(calls, false).wait().unwrap();
        let report = self.report();
        assert!(status.success(), "{report}");
        assert_eq!(report["tool_calls"].as_array().unwrap().len(), calls.len(), "{report}");

        let mut run = self.start(calls, true);
        let worker = wait_for("a worker", || worker_of(run.id()));
        // The last answer has arrived when its words are there. What was
        // mapped while that was looked for is in the next dump.
        wait_for("the last answer in the guest", || {
            contains(&memory_of(worker), "\"TEST_TOKEN\"").then_some(())
        });
        let memory = memory_of(worker);
        fs::write(self.path("memory"), memory).unwrap();
        // While it is open, so that the log ahead of it is there too.
        let mut left = vec![("memory", self.path("memory"))];
        for entry in fs::read_dir(self.path("state/journal")).unwrap() {
            let from = entry.unwrap().path();
            let to = self.path(&format!("copy-{}", from.file_name().unwrap().display()));
            fs::copy(&from, &to).unwrap();
            left.push(("journal", to));
        }
        run.kill().unwrap();
        run.wait().unwrap();
        for end in ["ends", "stays"] {
            left.push(("log", self.path(&format!("log-{end}"))));
        }
        left.push(("report", self.path("report-ends")));
        left
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A program that makes these calls, one after the other, and writes out all
/// that it is told.
fn program(calls: &[(String, Value)], stays: bool) -> String {
    let mut data = String::new();
    let mut place = |text: &str| {
        let at = data.len();
        data.push_str(text);
        (at, text.len())
    };
    let mut body = String::from("(local $n i32) (local $at i32) (local.set $at (i32.const 65536))");
    for (tool, request) in calls {
        let ((name, name_len), (ask, ask_len)) = (place(tool), place(&request.to_string()));
        body.push_str(&format!(
            "(drop (call $call (i32.const {name}) (i32.const {name_len}) (i32.const {ask}) (i32.const {ask_len})))
             (local.set $n (call $resp_read (local.get $at) (i32.const 0) (i32.const 65536)))
             (drop (call $output (local.get $at) (local.get $n)))
             (local.set $at (i32.add (local.get $at) (local.get $n)))\n"
        ));
    }
    if stays {
        let ((name, name_len), (ask, ask_len)) = (place("hub.never"), place("{}"));
        body.push_str(&format!(
            "(drop (call $call (i32.const {name}) (i32.const {name_len}) (i32.const {ask}) (i32.const {ask_len})))"
        ));
    }
    assert!(data.len() < 65536);
    let data: String = data.bytes().map(|byte| format!("\\{byte:02x}")).collect();
    let more = format!("(memory (export \"memory\") 32) (data (i32.const 0) \"{data}\")");
    forge_module(&more, &format!("{body} (i32.const 0)"))
}

/// Each way that our hostile servers have to tell what they know. The last
/// one's answer shows that all are there.
fn all_ways(port: u16) -> Vec<(String, Value)> {
    let mut calls: Vec<(String, Value)> = Vec::new();
    let mut add = |tool: &str, request: Value| calls.push((tool.to_owned(), request));
    for server in ["hub", "keyed"] {
        for how in [
            "raw",
            "base64",
            "base64 lines",
            "hex",
            "upper hex",
            "percent",
            "split",
            "base64 split",
        ] {
            add(&format!("{server}.spell"), json!({ "how": how }));
        }
        add(&format!("{server}.fail"), json!({}));
        add(&format!("{server}.misfit"), json!({}));
    }
    add("raw.nonsense", json!({}));
    for before in [0, 470, 490, 505] {
        add("raw.misfit", json!({ "before": before }));
    }
    add("names.fine", json!({}));
    add("api.tell", json!({}));
    add("api.fail", json!({}));
    for path in ["tell", "fail"] {
        let url = format!("http://127.0.0.1:{port}/{path}");
        add("http.fetch", json!({ "method": "GET", "url": url }));
    }
    add("resource.read", json!({ "server": "hub", "uri": "test://open/token" }));
    add("hub.echo_env", json!({}));
    calls
}

/// What a value looks like in the spellings that are promised.
fn spellings(value: &str) -> Vec<String> {
    let mut all = vec![value.to_owned(), hex(value), hex(value).to_uppercase(), percent(value)];
    // A key's lines, each by itself.
    all.extend(value.lines().filter(|line| line.len() > 30).map(str::to_owned));
    all
}

fn attack_20_no_credential_is_in_a_log_a_report_a_journal_or_a_memory() {
    let port = echo();
    let desk = Desk::new("told", port);
    let left = desk.left_by(&all_ways(port));
    let log = fs::read_to_string(desk.path("log-ends")).unwrap();
    assert!(log.matches("carried credentials").count() > 20, "they were told: {log}");
    for (kind, file) in &left {
        let bytes = fs::read(file).unwrap();
        for Credential { variable, value } in &desk.credentials {
            for spelled in spellings(value) {
                assert!(!contains(&bytes, &spelled), "{variable} is in {kind}, {}", file.display());
            }
        }
    }

    // The marker is a tool's name: the program has it in its memory, the
    // broker refuses it by name, and so it is everywhere.
    let planted = Desk::new("planted", port);
    let calls = [(format!("hub.{}", marker()), json!({})), ("hub.echo_env".to_owned(), json!({}))];
    let with_marker = planted.left_by(&calls);
    let mut found: Vec<PathBuf> = Vec::new();
    for kind in ["memory", "journal", "log", "report"] {
        let of_it: Vec<&PathBuf> = with_marker
            .iter()
            .filter(|(its, file)| *its == kind && contains(&fs::read(file).unwrap(), &marker()))
            .map(|(_, file)| file)
            .collect();
        assert!(!of_it.is_empty(), "the marker is not in any {kind}");
        found.extend(of_it.into_iter().cloned());
    }
    if std::env::var_os("FORGE_SCAN").is_none_or(|asked| asked != "1") {
        eprintln!("SKIPPED: set FORGE_SCAN=1 to have detect-secrets look at the same files");
        return;
    }
    let kinds = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.rsplit_once(": ")?.1.to_owned())).collect()
    };
    let said = scanned(&found);
    assert_eq!(kinds(&said), vec!["AWS Access Key"; found.len()], "{said}");
    // Each credential is of a kind that it knows.
    for Credential { variable, value } in &desk.credentials {
        fs::write(planted.path(variable), format!("\0 {value} \0")).unwrap();
        assert!(!scanned(&[planted.path(variable)]).is_empty(), "it does not know {variable}");
    }
    let mut files: Vec<PathBuf> = left.into_iter().map(|(_, file)| file).collect();
    files.extend(std::env::var_os("FORGE_SCAN_FILES").iter().flat_map(std::env::split_paths));
    assert_eq!(scanned(&files), "");
}

/// What the foreign scanner says of these files.
fn scanned(files: &[PathBuf]) -> String {
    let scan = Path::new(env!("CARGO_MANIFEST_DIR")).join("../toolbroker/tests/secret-scan");
    let cache = std::env::var_os("FORGE_SCAN_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_TARGET_TMPDIR")).join("secret-scan"), PathBuf::from);
    let output = Command::new(scan)
        .args(files)
        .env("FORGE_SCAN_CACHE", cache)
        // It holds the words that a private key begins with.
        .env("FORGE_SCAN_KNOWN", FORGE)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{error}");
    said
}

fn attack_6_no_spelling_of_a_name_reaches_a_tool_that_is_not_granted() {
    let desk = Desk::new("names", 9);
    let names = [
        "hub.Echo_env",
        "Hub.echo_env",
        "hub.echo_env\0",
        "hub.echo\0_env",
        "hub.echo_env ",
        " hub.echo_env",
        "hub.\u{435}cho_env",
        "hub.echo_env\u{200b}",
        "hub..echo_env",
        "hub/echo_env",
        "hub.echo_\u{ff45}nv",
        "keyed.echo_env",
        "hub.hub.echo_env",
        "",
        "hub.",
        ".echo_env",
        "hub",
        "forge.call",
    ];
    let mut calls: Vec<(String, Value)> =
        names.iter().map(|name| ((*name).to_owned(), json!({}))).collect();
    calls.push(("hub.echo".to_owned(), json!({ "text": "said" })));
    let status = desk.start(&calls, false).wait().unwrap();
    let report = desk.report();
    assert!(status.success(), "{report}");
    let made = report["tool_calls"].as_array().unwrap();
    let (last, refused) = made.split_last().unwrap();
    assert_eq!((&last["tool"], &last["status"]), (&json!("hub.echo"), &json!("ok")));
    for call in refused {
        let status = call["status"].as_str().unwrap();
        assert!(matches!(status, "denied" | "no_such_tool"), "{call}");
    }
    assert!(!report["output"].as_str().unwrap().contains("variables"), "{report}");
    // Each that was a name at all is in the journal as it was written.
    let listed = Command::new(FORGE)
        .args(["journal", "list", "--json", "--state"])
        .arg(desk.path("state"))
        .output()
        .unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), made.len(), "{listed}");
}

fn attack_26_a_run_whose_journal_cannot_be_written_ends_as_that() {
    let desk = Desk::new("journal", 9);
    fs::create_dir(desk.path("state")).unwrap();
    // A file in the place of the folder: no user gets past that.
    fs::write(desk.path("state/journal"), "").unwrap();
    let calls = [("hub.echo".to_owned(), json!({ "text": "x" }))];
    let status = desk.start(&calls, false).wait().unwrap();
    let log = fs::read_to_string(desk.path("log-ends")).unwrap();
    let report = desk.report();
    assert_eq!(status.code(), Some(70), "{report}");
    assert_eq!(
        (&report["status"], &report["kind"]),
        (&json!("internal"), &json!("journal")),
        "{report}"
    );
    // That it called is no secret; what became of it is not on the disk.
    let call = &report["tool_calls"][0];
    assert_eq!(
        (&report["output"], &call["tool"], &call["status"]),
        (&json!(""), &json!("hub.echo"), &json!("unsettled")),
        "{report}"
    );
    assert!(log.contains("the journal fails"), "{log}");
}

fn attack_17_another_user_cannot_connect_to_the_service() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: only root can be somebody else");
        return;
    }
    let desk = Desk::new("service", 9);
    fs::set_permissions(&desk.folder, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(desk.path("signer.pub"), signer().trust_key().to_pem()).unwrap();
    let mut service = Command::new(FORGE)
        .current_dir(&desk.folder)
        .env("FORGE_STATE", desk.path("state"))
        .args(["serve", "--socket", "s.sock", "--trust", "signer.pub"])
        .args(["--ready", "0", "--ready-max", "0"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let socket = desk.path("s.sock");
    wait_for("the service", || UnixStream::connect(&socket).ok());
    let from_outside = {
        let socket = socket.clone();
        std::thread::spawn(move || {
            // SAFETY: takes numbers; by itself the call changes this thread
            // alone, which ends here.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(changed, 0);
            // The folder is open to it.
            assert!(socket.symlink_metadata().is_ok());
            UnixStream::connect(&socket).map(drop).map_err(|error| error.kind())
        })
    };
    assert_eq!(from_outside.join().unwrap(), Err(std::io::ErrorKind::PermissionDenied));
    UnixStream::connect(&socket).unwrap();
    service.kill().unwrap();
    service.wait().unwrap();
}
