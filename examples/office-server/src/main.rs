//! Example MCP servers: eight departments of a small company, each a server
//! of its own that this program becomes by its one argument.
//!
//! ```text
//! office-server billing
//! ```
//!
//! What each department has and can do stands in `office.json`: records, and
//! tools that find, get, add, change, remove or add up some of them. Deliberately
//! absent are credentials (`inventory-server` shows those), a database and a
//! network: records live as long as the process. Arguments are the caller's to
//! check against the schema; what does not fit is answered with an error.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt as _};
use serde::Deserialize;
use serde_json::{Map, Value, json};

const OFFICE: &str = include_str!("office.json");

type Record = Map<String, Value>;

/// Records of one kind are kept up to this many.
const RECORDS_MAX: usize = 10_000;

/// One department, as the file says it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Department {
    records: BTreeMap<String, Vec<Record>>,
    tools: Vec<Offer>,
}

/// One tool.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    name: String,
    description: String,
    #[serde(rename = "do")]
    action: Action,
    parameters: Map<String, Value>,
    required: Vec<String>,
}

/// What a tool does to the records of one kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Action {
    /// Those that fit every argument.
    Find { find: String },
    /// The one with this id.
    Get { get: String },
    /// A new one from the arguments.
    Add {
        add: String,
        #[serde(default)]
        set: Record,
    },
    /// The one with this id becomes as the arguments say.
    Change {
        change: String,
        #[serde(default)]
        set: Record,
    },
    /// The one with this id goes.
    Remove { remove: String },
    /// The sum of a field over those that fit.
    Total { total: String, field: String },
}

impl Offer {
    fn schema(&self) -> Map<String, Value> {
        let mut schema = Map::new();
        schema.insert("type".into(), "object".into());
        schema.insert("properties".into(), Value::Object(self.parameters.clone()));
        if !self.required.is_empty() {
            schema.insert("required".into(), json!(self.required));
        }
        schema.insert("additionalProperties".into(), false.into());
        schema
    }

    /// The arguments, with the defaults of those that are not given.
    fn complete(&self, mut arguments: Record) -> Record {
        for (name, schema) in &self.parameters {
            if let Some(default) = schema.get("default") {
                arguments.entry(name.clone()).or_insert_with(|| default.clone());
            }
        }
        arguments
    }
}

/// Whether a record fits an argument. Text fits if it is in the record's, in
/// any case; `from` and `until` are about its date.
fn fits(record: &Record, name: &str, wanted: &Value) -> bool {
    let date = || record.get("date").and_then(Value::as_str);
    match (name, wanted.as_str()) {
        ("from", Some(day)) => date().is_some_and(|date| date >= day),
        ("until", Some(day)) => date().is_some_and(|date| date <= day),
        // A message's sender, whose field is called as the days are.
        ("sender", Some(text)) => contains(record.get("from"), text),
        // `paid` is in `unpaid` and does not mean it.
        ("status" | "order" | "invoice" | "ticket", _) => record.get(name) == Some(wanted),
        (_, Some(text)) => contains(record.get(name), text),
        (_, None) => record.get(name) == Some(wanted),
    }
}

fn contains(field: Option<&Value>, text: &str) -> bool {
    let field = field.and_then(Value::as_str);
    field.is_some_and(|field| field.to_lowercase().contains(&text.to_lowercase()))
}

impl Department {
    fn call(&mut self, tool: &str, arguments: Record) -> Result<Value, String> {
        let offer = self.tools.iter().find(|offer| offer.name == tool);
        let offer = offer.ok_or_else(|| format!("there is no tool {tool}"))?.clone();
        let arguments = offer.complete(arguments);
        let all =
            |record: &&Record| arguments.iter().all(|(name, value)| fits(record, name, value));
        match offer.action {
            Action::Find { find } => {
                let found: Vec<&Record> = self.of(&find)?.iter().filter(all).collect();
                Ok(json!({ "count": found.len(), find: found }))
            }
            Action::Get { get } => {
                let records = self.of(&get)?;
                let place = place(records, &arguments)?;
                Ok(Value::Object(records[place].clone()))
            }
            Action::Add { add, set } => {
                let records = self.of(&add)?;
                if records.len() >= RECORDS_MAX {
                    return Err(format!("there are {RECORDS_MAX} {add} already"));
                }
                let mut record = Record::new();
                record.insert("id".into(), next_id(records).into());
                record.extend(arguments);
                record.extend(set);
                records.push(record.clone());
                Ok(Value::Object(record))
            }
            Action::Change { change, set } => {
                let records = self.of(&change)?;
                let place = place(records, &arguments)?;
                records[place].extend(arguments);
                records[place].extend(set);
                Ok(Value::Object(records[place].clone()))
            }
            Action::Remove { remove } => {
                let records = self.of(&remove)?;
                let place = place(records, &arguments)?;
                Ok(Value::Object(records.remove(place)))
            }
            Action::Total { total, field } => {
                let records = self.of(&total)?.iter().filter(all);
                let sum: i64 = records.filter_map(|record| record.get(&field)?.as_i64()).sum();
                Ok(json!({ field: sum }))
            }
        }
    }

    fn of(&mut self, kind: &str) -> Result<&mut Vec<Record>, String> {
        self.records.get_mut(kind).ok_or_else(|| format!("there are no {kind} here"))
    }
}

fn place(records: &[Record], arguments: &Record) -> Result<usize, String> {
    let id = arguments.get("id").unwrap_or(&Value::Null);
    let place = records.iter().position(|record| record.get("id") == Some(id));
    place.ok_or_else(|| format!("there is none with the id {id}"))
}

/// The next number after the highest, with the letters the others have.
fn next_id(records: &[Record]) -> String {
    let ids = records.iter().filter_map(|record| record.get("id")?.as_str()?.split_once('-'));
    let highest = ids.filter_map(|(letters, number)| Some((number.parse::<u64>().ok()?, letters)));
    let (number, letters) = highest.max().unwrap_or((0, "N"));
    format!("{letters}-{}", number + 1)
}

/// One department as an MCP server.
struct Server {
    name: String,
    department: Mutex<Department>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new(self.name.clone(), env!("CARGO_PKG_VERSION")))
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let department = self.department.lock().unwrap_or_else(PoisonError::into_inner);
        let tools = department.tools.iter();
        let tools = tools
            .map(|offer| Tool::new(offer.name.clone(), offer.description.clone(), offer.schema()));
        Ok(ListToolsResult::with_all_items(tools.collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let mut department = self.department.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = department.call(&request.name, request.arguments.unwrap_or_default());
        Ok(match answer {
            Ok(value) => CallToolResult::structured(value),
            Err(why) => CallToolResult::error(vec![ContentBlock::text(why)]),
        }
        .into())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut office: BTreeMap<String, Department> = match serde_json::from_str(OFFICE) {
        Ok(office) => office,
        Err(error) => {
            eprintln!("office-server: office.json: {error}");
            return ExitCode::from(70);
        }
    };
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(department) = office.remove(&name) else {
        let names: Vec<&str> = office.keys().map(String::as_str).collect();
        eprintln!("office-server: name one department: {}", names.join(", "));
        return ExitCode::from(2);
    };
    let server = Server { name, department: Mutex::new(department) };
    let served = async {
        server.serve(rmcp::transport::stdio()).await?.waiting().await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    match served.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("office-server: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn office() -> BTreeMap<String, Department> {
        serde_json::from_str(OFFICE).unwrap()
    }

    fn call(department: &mut Department, tool: &str, arguments: Value) -> Value {
        let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
        department.call(tool, arguments).unwrap()
    }

    #[test]
    fn every_tool_works_on_records_that_are_there() {
        for (name, department) in office() {
            for offer in &department.tools {
                let (Action::Find { find: kind }
                | Action::Get { get: kind }
                | Action::Add { add: kind, .. }
                | Action::Change { change: kind, .. }
                | Action::Remove { remove: kind }
                | Action::Total { total: kind, .. }) = &offer.action;
                assert!(department.records.contains_key(kind), "{name}.{}", offer.name);
                let known = |parameter| offer.parameters.contains_key(parameter);
                assert!(offer.required.iter().all(known), "{name}.{}", offer.name);
            }
        }
    }

    #[test]
    fn the_example_set_lists_what_the_servers_list() {
        let lines = include_str!("../../retrieval/surface/tools.jsonl").lines();
        let listed: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(listed.len(), 50);
        let mut count = 0;
        for (name, department) in office() {
            for offer in &department.tools {
                let full = format!("{name}.{}", offer.name);
                let line = listed.iter().find(|line| line["name"] == *full).unwrap();
                assert_eq!(line["description"], offer.description, "{full}");
                assert_eq!(line["inputSchema"], Value::Object(offer.schema()), "{full}");
                count += 1;
            }
        }
        assert_eq!(count, 47, "the other three are the inventory server's");
    }

    #[test]
    fn an_invoice_is_made_found_paid_and_no_longer_owed() {
        let billing = &mut office().remove("billing").unwrap();
        let owed = |billing: &mut Department| {
            call(billing, "outstanding_total", json!({}))["amount_cents"].as_i64().unwrap()
        };
        let before = owed(billing);
        let made = json!({"customer": "Zed", "amount_cents": 700});
        let id = call(billing, "create_invoice", made)["id"].clone();
        assert_eq!(id, "B-4");
        assert_eq!(owed(billing), before + 700);
        assert_eq!(call(billing, "list_invoices", json!({"customer": "zed"}))["count"], 1);
        call(billing, "mark_paid", json!({"id": id}));
        assert_eq!(owed(billing), before);
    }

    #[test]
    fn days_bound_a_search_and_what_is_removed_is_gone() {
        let calendar = &mut office().remove("calendar").unwrap();
        let until = json!({"from": "2026-03-01", "until": "2026-03-03"});
        assert_eq!(call(calendar, "list_events", until)["count"], 2);
        call(calendar, "cancel_event", json!({"id": "E-1"}));
        let Value::Object(id) = json!({"id": "E-1"}) else { unreachable!() };
        let gone = calendar.call("get_event", id).unwrap_err();
        assert!(gone.contains("E-1"), "{gone}");
    }
}
