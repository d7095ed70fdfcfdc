//! An example MCP server: a warehouse with a handful of parts, which answers
//! only to those who hold its token.
//!
//! It distrusts its environment: without `INVENTORY_TOKEN` it does not start,
//! and with a wrong one every call is refused. It keeps only a hash of the
//! token it expects, as a real service would. Deliberately absent are a
//! database and a network: stock lives as long as the process.
//!
//! The demonstration's token is `demo-inventory-token`.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::handler::server::router::tool::ToolRouter;
use rmcp::handler::server::wrapper::{Json, Parameters};
use rmcp::model::{Implementation, ServerCapabilities, ServerConfig};
use rmcp::{ServerHandler, ServiceExt as _, tool, tool_handler, tool_router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The variable that carries the token.
const TOKEN_VARIABLE: &str = "INVENTORY_TOKEN";

/// SHA-256 of the token that is accepted.
const TOKEN_SHA256: [u8; 32] = [
    0x04, 0x91, 0x76, 0xb7, 0xfe, 0x84, 0xec, 0x68, 0xd2, 0x93, 0xb3, 0x07, 0x46, 0x3e, 0xc4, 0x60,
    0x72, 0x95, 0xbb, 0x9d, 0x1d, 0xe5, 0x2b, 0xe0, 0x28, 0xb5, 0xc5, 0x7e, 0x94, 0x0f, 0x84, 0x71,
];

/// Parts one search answers with at most.
const FOUND_MAX: usize = 50;

/// One kind of part.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct Part {
    /// Its number, say `P-1001`.
    part_id: String,
    /// What it is.
    name: String,
    /// What one costs, in euro cents.
    price_cents: u32,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FindParts {
    /// Words that must all be in the part's name, in any case; empty for all
    /// parts.
    query: String,
    /// How many parts at most.
    #[schemars(range(min = 1, max = 50))]
    max: Option<usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Found {
    /// The parts, by number.
    parts: Vec<Part>,
    /// How many there are beyond `max`.
    more: usize,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetStock {
    /// The part's number.
    #[schemars(regex(pattern = "^P-[0-9]{4}$"))]
    part_id: String,
}

/// What there is of one part.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct Stock {
    /// The part's number.
    part_id: String,
    /// Pieces on the shelf that nobody reserved.
    available: u32,
    /// Pieces that are reserved.
    reserved: u32,
    /// Where they lie.
    shelf: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Reserve {
    /// The part's number.
    #[schemars(regex(pattern = "^P-[0-9]{4}$"))]
    part_id: String,
    /// How many pieces.
    #[schemars(range(min = 1, max = 1000))]
    count: u32,
}

/// A part with what there is of it.
#[derive(Debug)]
struct Entry {
    part: Part,
    available: u32,
    reserved: u32,
    shelf: &'static str,
}

impl Entry {
    fn stock(&self) -> Stock {
        Stock {
            part_id: self.part.part_id.clone(),
            available: self.available,
            reserved: self.reserved,
            shelf: self.shelf.to_owned(),
        }
    }
}

fn warehouse() -> Vec<Entry> {
    [
        ("P-1001", "M4 hex bolt, steel", 12, 480, "A1"),
        ("P-1002", "M4 hex nut, steel", 6, 950, "A1"),
        ("P-1003", "M6 hex bolt, steel", 18, 35, "A2"),
        ("P-1004", "M6 hex bolt, brass", 41, 0, "A2"),
        ("P-2001", "Ball bearing 608", 190, 64, "B3"),
        ("P-2002", "Ball bearing 6001", 310, 7, "B3"),
        ("P-3001", "Stepper motor NEMA 17", 1450, 12, "C1"),
        ("P-3002", "Stepper motor NEMA 23", 3890, 3, "C1"),
    ]
    .into_iter()
    .map(|(part_id, name, price_cents, available, shelf)| Entry {
        part: Part { part_id: part_id.into(), name: name.into(), price_cents },
        available,
        reserved: 0,
        shelf,
    })
    .collect()
}

#[derive(Clone)]
struct Inventory {
    token_sha256: [u8; 32],
    entries: Arc<Mutex<Vec<Entry>>>,
    tool_router: ToolRouter<Self>,
}

impl Inventory {
    fn new(token: &str) -> Self {
        Self {
            token_sha256: Sha256::digest(token).into(),
            entries: Arc::new(Mutex::new(warehouse())),
            tool_router: Self::tool_router(),
        }
    }

    /// Every call asks again, as every request to a real service would.
    fn authorised(&self) -> Result<(), String> {
        if self.token_sha256 == TOKEN_SHA256 {
            Ok(())
        } else {
            Err(format!("401: the token in {TOKEN_VARIABLE} is not valid"))
        }
    }

    fn with_entry<T>(
        &self,
        part_id: &str,
        then: impl FnOnce(&mut Entry) -> Result<T, String>,
    ) -> Result<T, String> {
        self.authorised()?;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries
            .iter_mut()
            .find(|entry| entry.part.part_id == part_id)
            .ok_or_else(|| format!("there is no part {part_id}"))?;
        then(entry)
    }
}

#[tool_router]
impl Inventory {
    /// Finds parts by words in their names.
    #[tool]
    async fn find_parts(
        &self,
        Parameters(FindParts { query, max }): Parameters<FindParts>,
    ) -> Result<Json<Found>, String> {
        self.authorised()?;
        let words: Vec<String> = query.split_whitespace().map(str::to_lowercase).collect();
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parts: Vec<Part> = entries
            .iter()
            .filter(|entry| {
                let name = entry.part.name.to_lowercase();
                words.iter().all(|word| name.contains(word.as_str()))
            })
            .map(|entry| entry.part.clone())
            .collect();
        let kept = parts.len().min(max.unwrap_or(FOUND_MAX).min(FOUND_MAX));
        let more = parts.len() - kept;
        parts.truncate(kept);
        Ok(Json(Found { parts, more }))
    }

    /// Tells what there is of one part.
    #[tool]
    async fn get_stock(
        &self,
        Parameters(GetStock { part_id }): Parameters<GetStock>,
    ) -> Result<Json<Stock>, String> {
        self.with_entry(&part_id, |entry| Ok(Json(entry.stock())))
    }

    /// Reserves pieces of one part and tells what is left.
    #[tool]
    async fn reserve(
        &self,
        Parameters(Reserve { part_id, count }): Parameters<Reserve>,
    ) -> Result<Json<Stock>, String> {
        self.with_entry(&part_id, |entry| {
            entry.available = entry.available.checked_sub(count).ok_or_else(|| {
                format!("{part_id}: {count} wanted, {} available", entry.available)
            })?;
            entry.reserved += count;
            Ok(Json(entry.stock()))
        })
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Inventory {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("inventory", env!("CARGO_PKG_VERSION")))
            .with_instructions("A small warehouse: find parts, look at stock, reserve pieces.")
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let token = std::env::var(TOKEN_VARIABLE).unwrap_or_default();
    if token.is_empty() {
        eprintln!(
            "inventory-server: {TOKEN_VARIABLE} is not set. This server gives nothing away \
             without it: put it into the server's credentials (for the demonstration: \
             demo-inventory-token)."
        );
        return ExitCode::from(2);
    }
    let served = async {
        Inventory::new(&token).serve(rmcp::transport::stdio()).await?.waiting().await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    match served.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("inventory-server: {error}");
            ExitCode::FAILURE
        }
    }
}
