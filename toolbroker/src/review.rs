//! Which definition of each tool was approved.
//!
//! A tool's description is what a model reads and its schema what a call is
//! checked against; both are its server's, which may change them at any time.
//! So each definition is pinned by its digest when it is first reviewed, and
//! a tool whose definition is another by now is neither granted nor called
//! until the operator approves it anew.
//!
//! | mode | a tool without a pin |
//! |---|---|
//! | `first_use` | is pinned as it is when it is first listed or granted |
//! | `required` | waits for the operator's approval |
//!
//! # The file
//! `reviews.json` in the state folder, mode 0600, replaced as a whole: a
//! reader sees the old one or the new one. It keeps the definitions too, so
//! that a change can be shown as one. Several brokers may share a folder:
//! writers take turns by a lock, and a reader looks whether the file is
//! another each time it matters. Pins are by a tool's name: configurations
//! that give one name to different servers need different folders. A broker
//! without a folder pins for as long as it lives.
//!
//! Distrusted are the servers, whose text is kept, bounded and never
//! interpreted. The broker's own tools need no review: they change with the
//! broker alone. Deliberately absent is a record of who approved what when.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forge_log::Seldom;
use forge_protocol::broker::{Standing, ToolSpec};
use forge_protocol::name::{RESERVED_SERVERS, ToolName};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::definition::Tool;
use crate::difference;
use crate::locks::lock;
use crate::state::is_trusted;

/// The file in the state folder that holds the pins.
const REVIEWS_FILE: &str = "reviews.json";
/// The file that writers lock.
const LOCK_FILE: &str = "reviews.lock";
/// The file's form.
const FORMAT: u32 = 1;
/// All pins together, in bytes of the file.
const FILE_BYTES_MAX: u64 = if cfg!(test) { 256 * 1024 } else { 64 * 1024 * 1024 };
/// The pins of one server's tools that come at first sight, in bytes of the file: what
/// its later tools do not have they get by approval alone, and other servers' have room.
const SERVER_BYTES_MAX: usize = if cfg!(test) { 64 * 1024 } else { 8 * 1024 * 1024 };
/// What a pin takes in the file beside its texts, and a little.
const PIN_BYTES: usize = 256;
/// A schema is indented for its reader up to so many bytes: all tools of a server have to
/// fit into one list.
const INDENTED_BYTES_MAX: usize = 64 * 1024;

/// What becomes of a tool without a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// It is pinned as it is.
    #[default]
    FirstUse,
    /// It waits for the operator.
    Required,
}

/// Why the pins cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The file cannot be read or written.
    #[error("the reviews of tools in {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others could have written it.
    #[error(
        "the reviews of tools in {}: others may write it, or own it: give it to the toolbroker's \
         user, and chmod 600 it",
        file.display()
    )]
    Open {
        /// The file.
        file: PathBuf,
    },
    /// It is not what was written.
    #[error(
        "the reviews of tools in {} cannot be understood: move the file away, and review the \
         tools anew", file.display()
    )]
    Malformed {
        /// The file.
        file: PathBuf,
    },
    /// More than the file may hold.
    #[error(
        "the reviews of tools in {} would have {got} bytes, the limit is {FILE_BYTES_MAX}: move \
         the file away, and review the tools anew", file.display()
    )]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// How many.
        got: usize,
    },
}

/// A tool whose present definition is not approved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{tool} is blocked, its definition is {}: look at it with `forge-vmm tools review`, then \
     `forge-vmm tools approve {}`",
    match standing { Standing::Changed => "another than the one approved", _ => "not approved yet" },
    tool.shell_word().unwrap_or("NAME".into()),
)]
pub struct Blocked {
    /// The tool.
    pub tool: ToolName,
    /// How its definition stands.
    pub standing: Standing,
}

/// Why a run may not call a tool that it was granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreviewed {
    /// It is not approved any more.
    #[error("{0}")]
    Blocked(#[from] Blocked),
    /// Nobody can tell.
    #[error("the reviews of tools fail, so the call was not made: the operator's log says why")]
    Failed,
}

/// One approved definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    definition_sha256: String,
    description: String,
    input_schema: String,
    output_schema: Option<String>,
    /// What it takes in the file, reckoned once: it is asked for with each look at a tool
    /// that is new.
    #[serde(skip)]
    written_bytes: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    format: u32,
    tools: BTreeMap<String, Pin>,
}

/// Which file was read: another one has another of these.
type Stamp = (u64, u64, u64, i64, i64);
/// The same, and whose it is and who may write it.
type Change = (Stamp, i64, i64);

#[derive(Debug, Default)]
struct Book {
    pins: BTreeMap<String, Pin>,
    stamp: Option<Stamp>,
    /// As it was when it could not be used.
    wrong: Option<Change>,
}

/// The approved definitions.
#[derive(Debug)]
pub struct Reviews {
    mode: Mode,
    folder: Option<PathBuf>,
    book: Mutex<Book>,
    /// Tools whose definitions changed, and to what, as the log has it.
    told: Mutex<BTreeMap<String, [u8; 32]>>,
}

impl Pin {
    fn of(spec: &ToolSpec) -> Self {
        let ToolSpec { name, description, input_schema, output_schema, .. } = spec;
        Self {
            definition_sha256: crate::hex(&spec.definition_sha256),
            description: description.clone(),
            input_schema: input_schema.clone(),
            output_schema: output_schema.clone(),
            written_bytes: written_bytes(
                name.as_str(),
                description,
                input_schema,
                output_schema.as_deref(),
            ),
        }
    }

    /// The same pin of a tool of this name, as it was read.
    fn reckoned(self, name: &str) -> Self {
        let Self { description, input_schema, output_schema, .. } = &self;
        let written_bytes =
            written_bytes(name, description, input_schema, output_schema.as_deref());
        Self { written_bytes, ..self }
    }

    /// For a person to read, all of it.
    fn shown(&self) -> String {
        let pretty = |json: &str| {
            let value: serde_json::Value = serde_json::from_str(json).unwrap_or_default();
            let pretty = serde_json::to_string_pretty(&value).unwrap_or_default();
            if pretty.len() > INDENTED_BYTES_MAX { json.to_owned() } else { pretty }
        };
        let mut text = format!("description:\n{}\n", self.description);
        let _ = writeln!(text, "input schema:\n{}", pretty(&self.input_schema));
        if let Some(schema) = &self.output_schema {
            let _ = writeln!(text, "output schema:\n{}", pretty(schema));
        }
        text
    }
}

/// What may be pinned of a server's tools at first sight, in bytes of the file.
struct Room {
    of_its_share: usize,
    of_the_file: usize,
}

impl Room {
    fn of(server: &str, pins: &BTreeMap<String, Pin>) -> Self {
        let first = format!("{server}.");
        let (mut all, mut own) = (PIN_BYTES, 0);
        for (name, pin) in pins {
            all += pin.written_bytes;
            own += if name.starts_with(&first) { pin.written_bytes } else { 0 };
        }
        Self {
            of_its_share: SERVER_BYTES_MAX.saturating_sub(own),
            of_the_file: (FILE_BYTES_MAX as usize).saturating_sub(all),
        }
    }

    /// What is left with this tool's definition taken, if it has room.
    fn without(&self, tool: &Tool) -> Option<Self> {
        let ToolSpec { name, description, input_schema, output_schema, .. } = tool.spec();
        let output_schema = output_schema.as_deref();
        let bytes = written_bytes(name.as_str(), description, input_schema, output_schema);
        Some(Self {
            of_its_share: self.of_its_share.checked_sub(bytes)?,
            of_the_file: self.of_the_file.checked_sub(bytes)?,
        })
    }
}

/// What a definition takes in the file. A server chooses its characters, of which JSON
/// writes some in six bytes.
fn written_bytes(
    name: &str,
    description: &str,
    input_schema: &str,
    output_schema: Option<&str>,
) -> usize {
    let written = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    };
    let texts = [name, description, input_schema].into_iter().chain(output_schema);
    PIN_BYTES + texts.flat_map(str::bytes).map(written).sum::<usize>()
}

impl Reviews {
    /// The pins in the state folder `folder`; without one, pins for as long
    /// as the process lives.
    ///
    /// # Errors
    /// [`ReviewError`], if there is a file that cannot be used.
    pub fn open(mode: Mode, folder: Option<&Path>) -> Result<Self, ReviewError> {
        let folder = folder.map(Path::to_owned);
        let reviews = Self { mode, folder, book: Mutex::default(), told: Mutex::default() };
        reviews.refresh()?;
        Ok(reviews)
    }

    /// How a tool's present definition stands, by what was read last.
    #[must_use]
    pub fn standing(&self, tool: &Tool) -> Standing {
        if RESERVED_SERVERS.contains(&tool.name().server()) {
            return Standing::Approved;
        }
        let book = lock(&self.book);
        match book.pins.get(tool.name().as_str()) {
            None => Standing::New,
            Some(pin) if pin.definition_sha256 == crate::hex(&tool.sha256()) => Standing::Approved,
            Some(_) => Standing::Changed,
        }
    }

    /// Whether looking at these tools would pin any of them, which takes its
    /// time: [`Reviews::see`] does it. Looks whether the file is another.
    ///
    /// # Errors
    /// [`ReviewError`].
    pub fn would_pin(&self, tools: &[Arc<Tool>]) -> Result<bool, ReviewError> {
        self.refresh()?;
        self.tell_changed(tools);
        if self.mode != Mode::FirstUse {
            return Ok(false);
        }
        let new: Vec<_> =
            tools.iter().filter(|tool| self.standing(tool) == Standing::New).collect();
        let book = lock(&self.book);
        let mut servers = new.chunk_by(|a, b| a.name().server() == b.name().server());
        Ok(servers.any(|new| {
            let room = Room::of(new[0].name().server(), &book.pins);
            new.iter().any(|tool| room.without(tool).is_some())
        }))
    }

    /// Tells the log of each definition that is another than the approved one, once: all
    /// runs with that tool stop by it.
    fn tell_changed(&self, tools: &[Arc<Tool>]) {
        for tool in tools.iter().filter(|tool| self.standing(tool) == Standing::Changed) {
            let name = tool.name().as_str();
            let mut told = lock(&self.told);
            if told.insert(name.to_owned(), tool.sha256()) != Some(tool.sha256()) {
                tracing::warn!(
                    tool = ?name,
                    "its definition changed, and it is blocked: `forge-vmm tools review` shows what \
                     differs"
                );
            }
        }
    }

    /// The tools are seen: in the mode `first_use`, those without a pin get
    /// one, if their server has room for it.
    ///
    /// # Errors
    /// [`ReviewError`], and nothing is pinned.
    pub fn see(&self, tools: &[Arc<Tool>]) -> Result<(), ReviewError> {
        if !self.would_pin(tools)? {
            return Ok(());
        }
        self.write(|pins| {
            for of_server in tools.chunk_by(|a, b| a.name().server() == b.name().server()) {
                let server = of_server[0].name().server();
                if RESERVED_SERVERS.contains(&server) {
                    continue;
                }
                let mut room = Room::of(server, pins);
                for tool in of_server {
                    let name = tool.name().as_str();
                    // Whoever was first in another process stays first.
                    if pins.contains_key(name) {
                        continue;
                    }
                    let Some(left) = room.without(tool) else {
                        tracing::warn!(
                            tool = ?name,
                            "definition not pinned: this server, or all of them, had too many \
                             others; it waits for `forge-vmm tools approve`"
                        );
                        continue;
                    };
                    room = left;
                    tracing::info!(tool = ?name, "definition pinned at first sight");
                    pins.insert(name.to_owned(), Pin::of(tool.spec()));
                }
            }
        })
    }

    /// That all of these may be granted and called.
    ///
    /// # Errors
    /// [`Blocked`], for the first that may not.
    pub fn check(&self, tools: &[Arc<Tool>]) -> Result<(), Blocked> {
        for tool in tools {
            let standing = self.standing(tool);
            if standing != Standing::Approved {
                return Err(Blocked { tool: tool.name().clone(), standing });
            }
        }
        Ok(())
    }

    /// That a run which was granted the tool may call it now: the operator may have
    /// approved another definition since, or taken the approval back. Looks whether the
    /// file is another.
    ///
    /// # Errors
    /// [`Unreviewed`].
    pub fn check_call(&self, tool: &Tool) -> Result<(), Unreviewed> {
        if RESERVED_SERVERS.contains(&tool.name().server()) {
            return Ok(());
        }
        // A program may call without end, and a file that is wrong is read but once.
        if self.is_known_to_fail() {
            return Err(Unreviewed::Failed);
        }
        self.refresh().map_err(|error| {
            static SAID: Seldom = Seldom::each_second();
            if SAID.is_due() {
                tracing::error!(%error, "the reviews fail");
            }
            Unreviewed::Failed
        })?;
        // One that was granted had a pin, which somebody has taken away if it is new.
        match self.standing(tool) {
            Standing::Approved => Ok(()),
            standing => Err(Blocked { tool: tool.name().clone(), standing }.into()),
        }
    }

    /// Whether the file is one that was found to be wrong.
    fn is_known_to_fail(&self) -> bool {
        let wrong = lock(&self.book).wrong;
        let now = || fs::metadata(self.file()?).ok().map(|metadata| change(&metadata));
        wrong.is_some_and(|wrong| now() == Some(wrong))
    }

    /// Approves the present definitions of these. How many were not approved
    /// before.
    ///
    /// # Errors
    /// [`ReviewError`], and nothing is approved.
    pub fn approve(&self, tools: &[Arc<Tool>]) -> Result<u32, ReviewError> {
        let mut approved = 0;
        self.write(|pins| {
            for tool in tools.iter().filter(|it| !RESERVED_SERVERS.contains(&it.name().server())) {
                let pin = Pin::of(tool.spec());
                let name = tool.name().as_str();
                if pins.get(name) != Some(&pin) {
                    tracing::info!(tool = ?name, "definition approved");
                    pins.insert(name.to_owned(), pin);
                    approved += 1;
                }
            }
        })?;
        Ok(approved)
    }

    /// What differs between a tool's present definition and the approved one: all that
    /// does.
    #[must_use]
    pub fn difference(&self, tool: &Tool) -> String {
        if self.standing(tool) == Standing::Approved {
            return String::new();
        }
        let former = {
            let book = lock(&self.book);
            book.pins.get(tool.name().as_str()).map(Pin::shown).unwrap_or_default()
        };
        difference::shown(&former, &Pin::of(tool.spec()).shown())
    }

    fn file(&self) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(REVIEWS_FILE))
    }

    /// Reads the file if it is another than the one read last.
    fn refresh(&self) -> Result<(), ReviewError> {
        let Some(file) = self.file() else { return Ok(()) };
        let mut book = lock(&self.book);
        match fs::metadata(&file) {
            Ok(metadata) if book.stamp == Some(stamp(&metadata)) => book.wrong = None,
            Ok(metadata) => match read(&file) {
                Ok(read) => *book = read,
                Err(error) => {
                    // What the host could not read now it may read the next time.
                    let is_of_the_file = !matches!(error, ReviewError::Io { .. });
                    book.wrong = is_of_the_file.then(|| change(&metadata));
                    return Err(error);
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => *book = Book::default(),
            Err(source) => return Err(ReviewError::Io { file, source }),
        }
        Ok(())
    }

    /// Changes the pins, here and in the file.
    fn write(&self, change: impl FnOnce(&mut BTreeMap<String, Pin>)) -> Result<(), ReviewError> {
        let (Some(folder), Some(file)) = (&self.folder, self.file()) else {
            let mut book = lock(&self.book);
            change(&mut book.pins);
            return Ok(());
        };
        let failed = |source: io::Error| ReviewError::Io { file: file.clone(), source };
        if !folder.exists() {
            fs::create_dir_all(folder)
                .and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o700)))
                .map_err(failed)?;
        }
        // Let go of when it is closed.
        let turn = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(folder.join(LOCK_FILE))
            .map_err(failed)?;
        rustix::fs::flock(&turn, FlockOperation::LockExclusive)
            .map_err(|error| failed(error.into()))?;
        self.refresh()?;

        let mut pins = {
            let book = lock(&self.book);
            book.pins.clone()
        };
        change(&mut pins);
        let written = Written { format: FORMAT, tools: pins };
        let text = serde_json::to_string(&written).map_err(|error| failed(error.into()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(ReviewError::TooLarge { file, got: text.len() });
        }
        let draft = folder.join(format!(".{REVIEWS_FILE}.{}", std::process::id()));
        let replaced = (|| {
            let mut opened =
                File::options().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
            opened.write_all(text.as_bytes())?;
            opened.sync_all()?;
            fs::rename(&draft, &file)?;
            File::open(folder)?.sync_all()?;
            opened.metadata()
        })();
        let metadata = replaced.map_err(|source| {
            let _ = fs::remove_file(&draft);
            failed(source)
        })?;
        let mut book = lock(&self.book);
        *book = Book { pins: written.tools, stamp: Some(stamp(&metadata)), wrong: None };
        Ok(())
    }
}

fn change(metadata: &Metadata) -> Change {
    (stamp(metadata), metadata.ctime(), metadata.ctime_nsec())
}

fn stamp(metadata: &Metadata) -> Stamp {
    (metadata.dev(), metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec())
}

fn read(file: &Path) -> Result<Book, ReviewError> {
    let failed = |source| ReviewError::Io { file: file.to_owned(), source };
    let opened = File::open(file).map_err(failed)?;
    let metadata = opened.metadata().map_err(failed)?;
    // Who owns it may write it, whatever its bits say now.
    if metadata.mode() & 0o022 != 0 || !is_trusted(metadata.uid()) {
        return Err(ReviewError::Open { file: file.to_owned() });
    }
    let mut text = String::new();
    opened.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ReviewError::TooLarge { file: file.to_owned(), got: text.len() });
    }
    match serde_json::from_str(&text) {
        Ok(Written { format: FORMAT, tools }) => {
            let reckoned = |(name, pin): (String, Pin)| {
                let pin = pin.reckoned(&name);
                (name, pin)
            };
            let pins = tools.into_iter().map(reckoned).collect();
            Ok(Book { pins, stamp: Some(stamp(&metadata)), wrong: None })
        }
        _ => Err(ReviewError::Malformed { file: file.to_owned() }),
    }
}

#[cfg(test)]
mod tests;
