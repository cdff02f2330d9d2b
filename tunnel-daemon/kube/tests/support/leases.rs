//! Leases of the fake API server.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Mutex;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use http::{Method, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::{Answer, State};

/// Leases by name.
pub(crate) struct Leases {
    pub(crate) all: BTreeMap<String, Value>,
    version: u64,
    changes: broadcast::Sender<Value>,
    /// The API server supports no streaming lists.
    pub(crate) is_old: bool,
    /// Names of leases that cannot be deleted.
    pub(crate) kept: BTreeSet<String>,
    /// Requests so far, by method.
    pub(crate) requests: BTreeMap<String, usize>,
    /// Pages of lists so far.
    pub(crate) pages: usize,
    /// Pages that are answered with "410 Gone" instead, of those that continue a list.
    pub(crate) gone: usize,
}

impl Default for Leases {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            version: 100,
            changes: broadcast::channel(64).0,
            is_old: false,
            kept: BTreeSet::new(),
            requests: BTreeMap::new(),
            pages: 0,
            gone: 0,
        }
    }
}

impl Leases {
    /// Writes a lease without access checks.
    pub(crate) fn put(&mut self, name: &str, mut lease: Value) -> Value {
        self.version += 1;
        lease["metadata"]["name"] = json!(name);
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        lease["kind"] = json!("Lease");
        lease["apiVersion"] = json!("coordination.k8s.io/v1");
        let kind = if self.all.contains_key(name) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        self.all.insert(name.to_owned(), lease.clone());
        drop(self.changes.send(json!({"type": kind, "object": lease})));
        lease
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Value> {
        let lease = self.all.remove(name)?;
        drop(
            self.changes
                .send(json!({"type": "DELETED", "object": lease})),
        );
        Some(lease)
    }

    pub(crate) fn end_watches(&mut self) {
        self.changes = broadcast::channel(64).0;
    }

    /// Sends an event as it is.
    pub(crate) fn say(&self, event: &Value) {
        drop(self.changes.send(event.clone()));
    }

    /// One page: of at most `limit` leases, behind the lease named `after`.
    fn list(&self, limit: usize, after: &str) -> Value {
        let behind = self.all.iter().filter(|(name, _)| name.as_str() > after);
        let page: Vec<_> = behind.clone().take(limit).collect();
        let rest = match page.last() {
            Some((last, _)) if behind.count() > page.len() => last.as_str(),
            _ => "",
        };
        json!({
            "kind": "LeaseList",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"resourceVersion": self.version.to_string(), "continue": rest},
            "items": page.iter().map(|(_, lease)| lease).collect::<Vec<_>>(),
        })
    }
}

/// The value of a parameter of a query.
fn parameter<'a>(query: &'a str, name: &str) -> &'a str {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .find(|(known, _)| *known == name)
        .map_or("", |(_, value)| value)
}

fn reply(status: u16, body: &Value) -> Response<Answer> {
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())).boxed_unsync());
    *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    response
}

fn failure(code: u16, reason: &str) -> Response<Answer> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason});
    reply(code, &status)
}

pub(super) fn answer(
    state: &Mutex<State>,
    method: &Method,
    uri: &Uri,
    body: &Value,
) -> Response<Answer> {
    let mut state = state.lock().expect("the state");
    // Listed and watched in the same way.
    let is_services = uri.path().ends_with("/services");
    let leases = if is_services {
        &mut state.services
    } else {
        &mut state.leases
    };
    *leases.requests.entry(method.to_string()).or_default() += 1;
    let name = uri.path().rsplit('/').next().unwrap_or_default().to_owned();
    let query = uri.query().unwrap_or_default();
    let current = leases.all.get(&name).cloned();
    let is_current = |version: &Value| {
        let current = current
            .as_ref()
            .map(|lease| &lease["metadata"]["resourceVersion"]);
        version.is_null() || current == Some(version)
    };
    let name = if is_services {
        "leases".to_owned()
    } else {
        name
    };
    match (method.as_str(), name.as_str()) {
        ("GET", "leases") if query.contains("watch=true") => {
            let streams = query.contains("sendInitialEvents=true");
            if streams && leases.is_old {
                return failure(422, "Invalid");
            }
            let mut first = Vec::new();
            if streams {
                let added = |lease: &Value| json!({"type": "ADDED", "object": lease});
                first.extend(leases.all.values().map(added));
                first.push(json!({"type": "BOOKMARK", "object": {
                    "kind": "Lease",
                    "apiVersion": "coordination.k8s.io/v1",
                    "metadata": {
                        "resourceVersion": leases.version.to_string(),
                        "annotations": {"k8s.io/initial-events-end": "true"},
                    },
                }}));
            }
            let changes = stream::unfold(leases.changes.subscribe(), async |mut changes| {
                let change = changes.recv().await.ok()?;
                Some((change, changes))
            });
            let lines = stream::iter(first).chain(changes).map(|event| {
                let line = Bytes::from(format!("{event}\n"));
                Ok::<_, Infallible>(Frame::data(line))
            });
            Response::new(StreamBody::new(lines).boxed_unsync())
        }
        ("GET", "leases") => {
            leases.pages += 1;
            let after = parameter(query, "continue");
            if !after.is_empty() && leases.gone > 0 {
                leases.gone -= 1;
                return failure(410, "Expired");
            }
            let limit = parameter(query, "limit").parse().unwrap_or(usize::MAX);
            reply(200, &leases.list(limit, after))
        }
        ("POST", "leases") => {
            let name = body["metadata"]["name"].as_str().unwrap_or_default();
            match leases.all.contains_key(name) {
                true => failure(409, "AlreadyExists"),
                false => reply(201, &leases.put(name, body.clone())),
            }
        }
        ("GET", _) => match current {
            Some(lease) => reply(200, &lease),
            None => failure(404, "NotFound"),
        },
        ("PUT", _) if current.is_none() => failure(404, "NotFound"),
        ("PUT", _) if !is_current(&body["metadata"]["resourceVersion"]) => failure(409, "Conflict"),
        ("PUT", _) => reply(200, &leases.put(&name, body.clone())),
        ("DELETE", name) if leases.kept.contains(name) => failure(403, "Forbidden"),
        ("DELETE", _) if current.is_none() => failure(404, "NotFound"),
        ("DELETE", _) if !is_current(&body["preconditions"]["resourceVersion"]) => {
            failure(409, "Conflict")
        }
        ("DELETE", _) => {
            leases.remove(&name);
            reply(
                200,
                &json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}),
            )
        }
        _ => failure(405, "MethodNotAllowed"),
    }
}
