//! The flags, as they are written.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use forge_protocol::limits::{FOUND_TOOLS_MAX, RunLimits, SESSION_BYTES_MAX};
use forge_protocol::name::{ToolName, is_session};
use forge_vmm::isolation::Isolation;
use serde::Deserialize;

use super::place::{Place, VSOCK};

/// Runs each model-written program once, in a KVM virtual machine made for
/// that run.
#[derive(Debug, Parser)]
#[command(name = "forge-vmm", version, disable_help_subcommand = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a signed program in a VM and print its output
    Run(Box<RunArgs>),
    /// Keep VMs ready and run programs for other processes
    Serve(Box<ServeArgs>),
    /// Let any MCP client search tools and run programs: a server over stdio,
    /// or over HTTP with --listen
    Mcp(Box<McpArgs>),
    /// Make a key pair to sign programs with
    Keygen(KeygenArgs),
    /// Sign a program; text (.wat) is assembled first
    Sign(SignArgs),
    /// Show what a program asks for: its imports are its capabilities
    Inspect(InspectArgs),
    /// Say everything in a program and its grant that would keep it from running
    Check(CheckArgs),
    /// List the tools there are, review their definitions, or call one
    Tools(ToolsArgs),
    /// Issue a grant, narrow it, or look into it
    Grant(GrantArgs),
    /// Read the journal: which tools were called, and what became of it
    Journal(JournalArgs),
    /// Say how a service stands
    Status(StatusArgs),
    /// Watch a service: runs, VMs, latencies, principals
    Top(TopArgs),
    /// Have a service take no more runs, and end when those it has are over
    Drain(DrainArgs),
    /// Print a commented forge.toml, or check one
    Config(ConfigArgs),
    /// Say what this host can do, what it lacks and how to fix it
    Probe(ProbeArgs),
    /// Measure what a run costs on this host, beside its floors
    Bench(BenchArgs),
    /// Print what completes this command's words in a shell
    Completions(CompletionsArgs),
    /// Write the manual's pages into a folder
    #[command(hide = true)]
    Man(ManArgs),
}

/// Where the tools come from.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct BrokerArgs {
    /// Tool servers, in the mcpServers JSON that MCP clients use
    #[arg(long, value_name = "FILE")]
    pub(crate) mcp_config: Option<PathBuf>,
    /// The configuration, a forge.toml
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where the key that signs grants, the reviews of tools and the journal
    /// of calls are kept
    /// [default: forge-vmm below $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "DIR", env = super::STATE)]
    pub(crate) state: Option<PathBuf>,
}

/// Who asks for tools.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct AskerArgs {
    /// Who asks: the principal whose roles and grants count
    #[arg(long, value_name = "NAME", default_value = "local", value_parser = principal)]
    pub(crate) principal: String,
}

/// A principal's name, as the toolbroker takes it.
fn principal(name: &str) -> Result<String, String> {
    super::config::no_principal(name).map_or_else(|| Ok(name.to_owned()), Err)
}

/// A session's name, as the service takes it.
fn session(name: &str) -> Result<String, String> {
    match is_session(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("it has 1 to {SESSION_BYTES_MAX} bytes and no control characters")),
    }
}

/// What tools are searched for.
fn intent(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("the intent is empty: say in a sentence or two what is to be done".into());
    }
    Ok(text.to_owned())
}

/// A limit of a run.
fn limit(text: &str) -> Result<(String, u64), String> {
    let known = || format!("known are {}", RunLimits::NAMES.join(", "));
    let (name, value) = text.split_once('=').ok_or_else(|| format!("NAME=N; {}", known()))?;
    if !RunLimits::NAMES.contains(&name) {
        return Err(format!("there is no limit {name:?}; {}", known()));
    }
    let value = value.parse().map_err(|_| format!("{name} is a whole number from 0 on"))?;
    if !RunLimits::default().set(name, value) {
        return Err(format!("{name} is at most {}", u32::MAX));
    }
    Ok((name.to_owned(), value))
}

fn bytes(text: &str) -> Result<u64, &'static str> {
    text.parse().map_err(|_| "a number of bytes goes here, as 33554432 for 32 MiB")
}

/// The path of a service's socket, for commands that take no other address.
fn socket() -> impl clap::builder::TypedValueParser<Value = PathBuf> {
    no_vsock("only `run` takes vsock:CID:PORT: give the path of the service's socket")
}

fn own_socket() -> impl clap::builder::TypedValueParser<Value = PathBuf> {
    no_vsock("a service listens on AF_VSOCK by [service.vsock] in forge.toml: this is a path")
}

fn no_vsock(why: &'static str) -> impl clap::builder::TypedValueParser<Value = PathBuf> {
    use clap::builder::TypedValueParser as _;
    clap::builder::PathBufValueParser::new().try_map(move |path| {
        let is_vsock = path.to_str().is_some_and(|text| text.starts_with(VSOCK));
        if is_vsock { Err(why) } else { Ok(path) }
    })
}

/// A time of whole milliseconds: of less, a run would have another than was said.
fn milliseconds(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if time.subsec_nanos() % 1_000_000 == 0 {
        Ok(time)
    } else {
        Err("whole milliseconds go here, such as 500ms or 5s".into())
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct RunArgs {
    /// A public key that programs are trusted by; may be given several times
    #[arg(long, value_name = "PUB")]
    pub(crate) trust: Vec<PathBuf>,
    /// Sign the program with this key first, and trust it (for development)
    #[arg(long, value_name = "KEY")]
    pub(crate) sign_with: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// Grant this tool to the run; may be given several times
    #[arg(long, value_name = "TOOL", conflicts_with = "grant")]
    pub(crate) allow: Vec<ToolName>,
    /// Run under this grant
    #[arg(long, value_name = "FILE")]
    pub(crate) grant: Option<PathBuf>,
    /// The session that the run belongs to: a grant may be good in one alone
    #[arg(long, value_name = "NAME", value_parser = session)]
    pub(crate) session: Option<String>,
    /// Grant the -k tools that fit this intent best (steps one on a line), those that write included
    #[arg(
        long,
        value_name = "TEXT",
        value_parser = intent,
        conflicts_with_all = ["allow", "grant"]
    )]
    pub(crate) intent: Option<String>,
    /// With --intent: how many tools at most
    #[arg(short, value_name = "N", default_value = "5", value_parser = hits(), requires = "intent")]
    pub(crate) k: u32,
    /// The run's input: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_negative_numbers = true)]
    pub(crate) input: String,
    /// How the program is isolated
    /// [default: [vm] isolation of --config, or vm]
    #[arg(long, value_enum, conflicts_with = "service")]
    pub(crate) isolation: Option<Isolation>,
    /// Have the service at this socket carry it out
    #[arg(
        long,
        value_name = "SOCKET|vsock:CID:PORT",
        conflicts_with_all = ["trust", "mcp_config", "config"]
    )]
    pub(crate) service: Option<Place>,
    /// With --service: have it keep VMs that have this program loaded
    #[arg(long, requires = "service")]
    pub(crate) prepare: bool,
    /// Write where the time went, as a trace that Perfetto opens
    #[arg(long, value_name = "FILE", conflicts_with = "service")]
    pub(crate) trace: Option<PathBuf>,
    /// Write the run's artifacts to this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) artifacts: Option<PathBuf>,
    /// Fuel: one for each instruction of the blocks of code that the program
    /// enters, which is more than it executes
    /// [default: 5000000000]
    #[arg(long, value_name = "N")]
    pub(crate) fuel: Option<u64>,
    /// Linear memory the program may have [default: 16777216, at most 67108864]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(crate) memory: Option<u64>,
    /// Wall clock the run may take, such as 500ms or 5s
    /// [default: 5s, at most 30s, or what [limits] in forge.toml says]
    #[arg(long, value_name = "DUR", value_parser = milliseconds)]
    pub(crate) timeout: Option<Duration>,
    /// Any limit of a run, by its name in docs/abi.md; may be given several
    /// times
    #[arg(long, value_name = "NAME=N", value_parser = limit)]
    pub(crate) limit: Vec<(String, u64)>,
    /// Print one JSON object instead of the bare output
    #[arg(long)]
    pub(crate) json: bool,
    /// The program: .wasm, or .wat with --sign-with
    pub(crate) program: PathBuf,
}

/// What becomes of a VM after its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ReuseArg {
    /// It is destroyed
    Fresh,
    /// It is put back to its first state, for runs of the same principal
    Reset,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ServeArgs {
    /// The unix socket to listen at
    /// [default: [service] socket of --config, or what systemd passes]
    #[arg(long, value_name = "PATH", value_parser = own_socket())]
    pub(crate) socket: Option<PathBuf>,
    /// A public key that programs are trusted by; may be given several times
    #[arg(long, value_name = "PUB")]
    pub(crate) trust: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

/// The VMs that stand ready; what is not given is `[pool]`'s of --config.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
pub(crate) struct PoolArgs {
    /// VMs that stand ready at all times [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) ready: Option<usize>,
    /// VMs that stand ready at most, when more are needed [default: 16]
    #[arg(long, value_name = "N")]
    pub(crate) ready_max: Option<usize>,
    /// What becomes of a VM after its run [default: fresh]
    #[arg(long, value_enum)]
    pub(crate) reuse: Option<ReuseArg>,
    /// With --reuse reset: compare one reset of so many with the first state,
    /// byte by byte; 0 for none [default: 1000]
    #[arg(long, value_name = "N")]
    pub(crate) prove_one_in: Option<u32>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct McpArgs {
    /// Have the service at this socket carry programs out, not one of its own
    #[arg(
        long,
        value_name = "SOCKET",
        value_parser = socket(),
        conflicts_with_all = ["mcp_config", "trust"]
    )]
    pub(crate) service: Option<PathBuf>,
    /// A public key that programs are trusted by that come signed; may be
    /// given several times
    #[arg(long, value_name = "PUB")]
    pub(crate) trust: Vec<PathBuf>,
    /// Sign programs that come unsigned with this key
    /// [default: a key made at each start, which nobody else trusts]
    #[arg(long, value_name = "KEY", conflicts_with = "listen")]
    pub(crate) sign_with: Option<PathBuf>,
    /// Serve the principals that have a token, [principals.<name>], over HTTP
    /// at this address, such as 127.0.0.1:8081
    #[arg(long, value_name = "ADDRESS", requires = "config")]
    pub(crate) listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print a forge.toml that says everything there is to say, commented out
    Init,
    /// Say everything that is wrong with a configuration, without starting
    /// anything
    Check(ConfigCheckArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfigCheckArgs {
    /// The configuration, a forge.toml
    /// [default: forge.toml, unless --mcp-config alone is given]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Tool servers, in the mcpServers JSON that MCP clients use
    #[arg(long, value_name = "FILE")]
    pub(crate) mcp_config: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct CompletionsArgs {
    /// For which shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ManArgs {
    /// An existing folder: a page for each command goes there
    pub(crate) folder: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StatusArgs {
    /// The service's socket
    #[arg(long, value_name = "SOCKET", value_parser = socket())]
    pub(crate) service: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct TopArgs {
    /// The service's socket
    #[arg(long, value_name = "SOCKET", value_parser = socket())]
    pub(crate) service: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct DrainArgs {
    /// The service's socket
    #[arg(long, value_name = "SOCKET", value_parser = socket())]
    pub(crate) service: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct KeygenArgs {
    /// Where signer.pem and signer.pub go
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct SignArgs {
    /// The private key (PKCS#8 PEM)
    #[arg(long, value_name = "K")]
    pub(crate) key: PathBuf,
    /// The program: .wasm or .wat
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// Where the signed program goes; `-` is standard output
    #[arg(short, long, value_name = "OUT.wasm")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct InspectArgs {
    /// Keys to look for the signer among
    #[arg(long, value_name = "PUB")]
    pub(crate) trust: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The program
    pub(crate) program: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct CheckArgs {
    /// A public key that programs are trusted by; may be given several times
    #[arg(long, value_name = "PUB")]
    pub(crate) trust: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// A tool that would be granted; may be given several times
    #[arg(long, value_name = "TOOL", conflicts_with = "grant")]
    pub(crate) allow: Vec<ToolName>,
    /// The grant it would run under
    #[arg(long, value_name = "FILE")]
    pub(crate) grant: Option<PathBuf>,
    /// The session that the run would belong to
    #[arg(long, value_name = "NAME", value_parser = session)]
    pub(crate) session: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The program
    pub(crate) program: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsArgs {
    #[command(subcommand)]
    pub(crate) command: ToolsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ToolsCommand {
    /// List the tools of the configured servers
    List(ToolsListArgs),
    /// Find the few tools that fit what is to be done
    Search(ToolsSearchArgs),
    /// Call a tool, under the same checks as a program's call
    Call(ToolsCallArgs),
    /// Show each tool's definition beside the approved one
    Review(ToolsReviewArgs),
    /// Approve the present definitions of tools
    Approve(ToolsApproveArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsApproveArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    /// Approve every tool there is
    #[arg(long, conflicts_with = "tools")]
    pub(crate) all: bool,
    /// The tools, as <server>.<tool>, each as it stands or, with @ and the digest that
    /// `tools review` shows, as it was then
    #[arg(required_unless_present = "all", value_name = "TOOL[@DIGEST]")]
    pub(crate) tools: Vec<Reviewed>,
}

/// Digits of a digest in hex that tell one definition from all others.
const DIGEST_DIGITS: std::ops::RangeInclusive<usize> = 16..=64;

/// A tool to be approved.
#[derive(Clone, Debug)]
pub(crate) struct Reviewed {
    pub(crate) name: ToolName,
    /// What the digest of its definition begins with, if that was looked at before.
    pub(crate) digest: Option<String>,
}

impl std::str::FromStr for Reviewed {
    type Err = forge_protocol::name::NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_digest = |it: &str| {
            DIGEST_DIGITS.contains(&it.len()) && it.bytes().all(|digit| digit.is_ascii_hexdigit())
        };
        let (name, digest) = match text.rsplit_once('@') {
            Some((name, digest)) if is_digest(digest) => (name, Some(digest.to_ascii_lowercase())),
            _ => (text, None),
        };
        Ok(Self { name: ToolName::parse(name)?, digest })
    }
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsListArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsReviewArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsSearchArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// How many tools
    #[arg(short, value_name = "N", default_value = "5", value_parser = hits())]
    pub(crate) k: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// What is to be done, in words; steps one on a line
    #[arg(value_parser = intent)]
    pub(crate) intent: String,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ToolsCallArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// How long the call may take, such as 500ms or 5s [default: 30s, or
    /// what [limits] in forge.toml says, which is the most]
    #[arg(long, value_name = "DUR", value_parser = milliseconds)]
    pub(crate) timeout: Option<Duration>,
    /// The tool, as <server>.<tool>
    pub(crate) tool: ToolName,
    /// Its arguments: JSON, @FILE, or - for standard input
    #[arg(value_name = "JSON|@FILE|-", default_value = "{}")]
    pub(crate) arguments: String,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct GrantArgs {
    #[command(subcommand)]
    pub(crate) command: GrantCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GrantCommand {
    /// Issue a grant for these tools as they are defined now
    Issue(GrantIssueArgs),
    /// Narrow a grant, offline: neither key nor tool servers are needed
    Attenuate(GrantAttenuateArgs),
    /// Verify a grant and show what is in it
    Inspect(GrantInspectArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct GrantIssueArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    #[command(flatten)]
    pub(crate) asker: AskerArgs,
    /// A tool to grant; may be given several times
    #[arg(long, value_name = "TOOL", required = true)]
    pub(crate) allow: Vec<ToolName>,
    /// How long the grant is good for, such as 10m or 1h
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration, default_value = "1h")]
    pub(crate) valid: Duration,
    #[command(flatten)]
    pub(crate) terms: GrantTerms,
    /// Where the grant goes; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

/// What a grant asks of those who use it.
#[derive(Debug, ClapArgs)]
pub(crate) struct GrantTerms {
    /// What the arguments of a tool's calls must be, such as
    /// 'shop.order:/quantity<=5'; may be given several times.
    /// After the place: =JSON, ^=beginning, =~pattern, <=N, >=N, <N or >N
    #[arg(long = "where", value_name = "TOOL:PLACE TEST")]
    pub(crate) constraints: Vec<String>,
    /// The most calls of one run
    #[arg(long, value_name = "N")]
    pub(crate) calls: Option<u32>,
    /// The most that one run's calls may cost together, in budget units
    #[arg(long, value_name = "N")]
    pub(crate) cost: Option<u32>,
    /// The one session it is good in
    #[arg(long, value_name = "NAME", value_parser = session)]
    pub(crate) session: Option<String>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct GrantAttenuateArgs {
    /// The only tools to leave in it; all if none is named
    #[arg(long, value_name = "TOOL")]
    pub(crate) allow: Vec<ToolName>,
    /// How long it is still good for, such as 10m, if that is sooner
    #[arg(long, value_name = "DUR", value_parser = humantime::parse_duration)]
    pub(crate) valid: Option<Duration>,
    #[command(flatten)]
    pub(crate) terms: GrantTerms,
    /// Where the narrower grant goes; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// The grant
    pub(crate) grant: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct GrantInspectArgs {
    #[command(flatten)]
    pub(crate) broker: BrokerArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The grant
    pub(crate) grant: PathBuf,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct JournalArgs {
    #[command(subcommand)]
    pub(crate) command: JournalCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// List calls and what became of them, oldest first
    List(JournalListArgs),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct JournalListArgs {
    /// The state folder whose journal to read
    /// [default: forge-vmm below $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "DIR", env = super::STATE)]
    pub(crate) state: Option<PathBuf>,
    /// Only this run's, by the run_id of its report
    #[arg(long, value_name = "ID")]
    pub(crate) run: Option<String>,
    /// At most so many, the newest [default: 1000]
    #[arg(long, value_name = "N")]
    pub(crate) last: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ProbeArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct BenchArgs {
    /// What to measure: a group (boot, exec, floors, ...), one case by its name,
    /// all of these, or retrieval (with --data)
    #[arg(value_name = "WHAT", default_value = "all")]
    pub(crate) what: String,
    /// With retrieval: the folder of <set>/tools.jsonl and <set>/queries.jsonl
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Samples of each latency
    #[arg(long, value_name = "N", default_value = "200", value_parser = samples)]
    pub(crate) runs: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the latencies into this folder, as latency.svg
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
    /// Say what moved since this earlier output of --json
    #[arg(long, value_name = "OLD.json")]
    pub(crate) compare: Option<PathBuf>,
}

fn hits() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(FOUND_TOOLS_MAX))
}

/// Samples that are kept of each latency.
const SAMPLES_MAX: usize = 1_000_000;

/// Samples, no more than are kept.
fn samples(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        more if more > SAMPLES_MAX => Err(format!("at most {SAMPLES_MAX}")),
        samples => Ok(samples),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1".into()),
        Ok(count) => Ok(count),
        Err(error) => Err(format!("{error}")),
    }
}
