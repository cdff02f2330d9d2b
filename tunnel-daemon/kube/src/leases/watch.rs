//! Which servers have leases, as an agent watches them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use http::StatusCode;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::list::{Found, Reader, name_of};
use super::{LeaseEvents, LeaseScope, now};
use crate::access::Api;
use crate::request::{Lines, RequestError, TIMEOUT, excerpt, watch as begin_watch};

/// Longest time between two checks for expired leases.
const RESYNC: Duration = Duration::from_secs(10);
/// The API server ends a watch after so many seconds, and a new one begins.
const WATCH_SECONDS: u64 = 300;
/// Longest silence of a watch without leases: its whole time, and a margin.
const SILENCE_MAX: Duration = Duration::from_secs(WATCH_SECONDS + 30);
/// The same with leases, each of which is renewed every 15 s: leases are listed again before any of them counts as expired.
const SILENCE_WITH_LEASES_MAX: Duration = Duration::from_secs(20);
/// Pauses between attempts, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Leases that are kept. A user with write access to leases in the namespace can add any number; control planes have three
/// to seven servers.
const LEASES_MAX: usize = 1024;
/// Longest name of a lease, and longest holder, bytes: what Kubernetes allows for a name.
const NAME_BYTES_MAX: usize = 253;

/// Ids of the servers with valid leases. `None` until the leases are known.
pub type Leased = Option<BTreeSet<String>>;

/// A line of a watch, its object unread.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// What is known of the leases.
struct View {
    /// Server and end of each lease, by the lease's name.
    leases: BTreeMap<String, (String, Timestamp)>,
    out: watch::Sender<Leased>,
    /// Whether an ignored lease was logged.
    warned: Arc<AtomicBool>,
}

/// Watches until all receivers of `out` are dropped. While the API server does not answer, the last state stands, even of
/// leases that would have expired: expiry counts only in sync.
pub async fn run(
    api: Arc<Api>,
    scope: LeaseScope,
    events: Arc<dyn LeaseEvents>,
    out: watch::Sender<Leased>,
) {
    let mut view = View {
        leases: BTreeMap::new(),
        out: out.clone(),
        warned: Arc::default(),
    };
    let mut reader = Reader::new(Arc::clone(&events));
    let (first, longest) = PAUSES;
    let mut pause = first;
    let mut is_away = false;
    let mut streams = true;
    let watching = async {
        loop {
            let began = Instant::now();
            let begun = begin(&api, &scope, &*events, &mut view, &mut reader, &mut streams).await;
            let failed = match begun {
                Ok(lines) => {
                    if std::mem::take(&mut is_away) {
                        tracing::info!("leases of servers are watched again");
                    }
                    view.follow(lines, &mut reader).await
                }
                Err(error) => Some(error),
            };
            if let Some(error) = failed
                && !std::mem::replace(&mut is_away, true)
            {
                let namespace = &scope.namespace;
                tracing::error!(
                    namespace,
                    api_server = api.address(),
                    %error,
                    "cannot watch the leases of servers: the last server count stays in use; retrying"
                );
            }
            // A watch that was fine for long starts again almost at once.
            pause = if began.elapsed() > longest {
                first
            } else {
                (pause * 2).min(longest)
            };
            tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
        }
    };
    tokio::select! {
        () = watching => (),
        () = out.closed() => (),
    }
}

/// Lists the leases and begins to watch, in one request where the API server supports that.
async fn begin(
    api: &Api,
    scope: &LeaseScope,
    events: &dyn LeaseEvents,
    view: &mut View,
    reader: &mut Reader,
    streams: &mut bool,
) -> Result<Lines, RequestError> {
    let watched = |begun: Result<Lines, RequestError>| {
        let (status, reason) = outcome(&begun);
        events.watched(status, reason);
        begun
    };
    if *streams {
        let query = format!(
            "&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&sendInitialEvents=true\
             &resourceVersionMatch=NotOlderThan&resourceVersion="
        );
        let began = Instant::now();
        let begun = watched(begin_watch(api, &scope.query(&query)).await);
        let is_unknown = begun.as_ref().err().is_some_and(is_unknown);
        if let Ok(mut lines) = begun {
            // If the whole list does not come in time, it is requested the other way: an API server may know the parameters
            // but not support them.
            let filled = tokio::time::timeout(TIMEOUT, view.fill(&mut lines, reader)).await;
            if let Ok(Ok(())) = filled {
                events.listed(200, "", began.elapsed());
                return Ok(lines);
            }
            *streams = filled.is_ok();
        }
        if is_unknown {
            *streams = false;
        }
    }
    let began = Instant::now();
    let listed = reader.list(api, scope).await;
    let (status, reason) = outcome(&listed);
    events.listed(status, reason, began.elapsed());
    let (leases, version) = listed?;
    view.leases.clear();
    for lease in leases {
        view.apply(lease);
    }
    view.publish();
    let query = format!(
        "&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}"
    );
    watched(begin_watch(api, &scope.query(&query)).await)
}

/// HTTP status and reason of a request, for its event.
fn outcome<T>(answer: &Result<T, RequestError>) -> (u16, &str) {
    let error = answer.as_ref().err();
    error.map_or((200, ""), RequestError::code_and_reason)
}

/// Whether the API server does not know the parameters of a streaming list.
fn is_unknown(error: &RequestError) -> bool {
    matches!(
        error.status(),
        Some(StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY | StatusCode::FORBIDDEN)
    )
}

/// Whether an event is the bookmark behind a streamed list.
fn ends_list(event: &Event) -> bool {
    let annotations = event.object.pointer("/metadata/annotations");
    let end = annotations.and_then(|all| all.get("k8s.io/initial-events-end"));
    event.kind == "BOOKMARK" && end.is_some()
}

impl View {
    /// Reads the initial list, up to the bookmark that ends it.
    async fn fill(&mut self, lines: &mut Lines, reader: &mut Reader) -> Result<(), RequestError> {
        let mut fresh = Self {
            leases: BTreeMap::new(),
            out: self.out.clone(),
            warned: Arc::clone(&self.warned),
        };
        loop {
            match lines.next::<Event>().await? {
                Some(Ok(event)) if ends_list(&event) => {
                    *self = fresh;
                    self.publish();
                    return Ok(());
                }
                Some(event) => fresh.take(event, reader)?,
                None => {
                    return Err(RequestError::Transport(
                        "the watch ended before its list was complete".to_owned(),
                    ));
                }
            }
        }
    }

    /// Follows a watch to its end; returns the failure, if it did not end in order.
    async fn follow(&mut self, mut lines: Lines, reader: &mut Reader) -> Option<RequestError> {
        let mut silent_since = Instant::now();
        loop {
            let next = lines.next::<Event>();
            match tokio::time::timeout(self.until_next_expiry(), next).await {
                Ok(Ok(Some(event))) => {
                    silent_since = Instant::now();
                    if let Err(error) = self.take(event, reader) {
                        return Some(error);
                    }
                    self.publish();
                }
                Ok(Ok(None)) => return None,
                Ok(Err(error)) => return Some(error),
                Err(_elapsed) if silent_since.elapsed() > self.silence_max() => {
                    return Some(RequestError::TimedOut);
                }
                Err(_elapsed) => self.publish(),
            }
        }
    }

    /// Applies an event. One that cannot be read is skipped: the lease stays as it was, until it ends.
    ///
    /// # Errors
    /// The watch is over.
    fn take(
        &mut self,
        event: Result<Event, RequestError>,
        reader: &mut Reader,
    ) -> Result<(), RequestError> {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                reader.skip("", &error.to_string());
                return Ok(());
            }
        };
        match event.kind.as_str() {
            "ADDED" | "MODIFIED" => {
                if let Some(lease) = reader.read(event.object) {
                    self.apply(lease);
                }
            }
            "DELETED" => {
                self.leases.remove(&name_of(&event.object));
            }
            "ERROR" => {
                let code = event.object["code"].as_u64().unwrap_or_default();
                let message = event.object["message"].as_str().unwrap_or_default();
                let message = excerpt(message);
                return Err(RequestError::Transport(format!(
                    "the watch ended: {code} {message}"
                )));
            }
            // A bookmark, or what a later API server sends besides.
            _ => (),
        }
        Ok(())
    }

    fn apply(&mut self, lease: Found) {
        let name = lease.name;
        match (lease.holder, lease.end) {
            (Some(holder), Some(end)) if self.has_room(&name, &holder) => {
                self.leases.insert(name, (holder, end));
            }
            _ => {
                self.leases.remove(&name);
            }
        }
    }

    /// Whether a lease is kept. The first ignored lease is logged.
    fn has_room(&self, name: &str, holder: &str) -> bool {
        let is_short = name.len() <= NAME_BYTES_MAX && holder.len() <= NAME_BYTES_MAX;
        let has_room = self.leases.len() < LEASES_MAX || self.leases.contains_key(name);
        let is_kept = is_short && has_room;
        if !is_kept && !self.warned.swap(true, Relaxed) {
            let lease = excerpt(name);
            tracing::warn!(
                lease,
                "leases of servers are passed over: at most {LEASES_MAX} are kept, with names and holders of at most \
                 {NAME_BYTES_MAX} bytes; check who writes leases with this label"
            );
        }
        is_kept
    }

    /// Publishes which servers have valid leases.
    fn publish(&self) {
        let now = now();
        let valid = self.leases.values().filter(|(_holder, end)| *end > now);
        let valid: BTreeSet<String> = valid.map(|(holder, _end)| holder.clone()).collect();
        self.out.send_if_modified(|leased| {
            let is_new = leased.as_ref() != Some(&valid);
            *leased = Some(valid);
            is_new
        });
    }

    fn silence_max(&self) -> Duration {
        if self.leases.is_empty() {
            SILENCE_MAX
        } else {
            SILENCE_WITH_LEASES_MAX
        }
    }

    fn until_next_expiry(&self) -> Duration {
        let now = now();
        let left =
            |end: &Timestamp| Duration::try_from(end.duration_since(now)).unwrap_or_default();
        let next = self
            .leases
            .values()
            .map(|(_holder, end)| left(end))
            .filter(|left| !left.is_zero())
            .min();
        // Slightly later than the end: a lease is over when its time has passed.
        next.map_or(RESYNC, |left| left + Duration::from_millis(10))
            .min(RESYNC)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::SignedDuration;

    use super::*;

    fn lease(name: &str, holder: &str) -> Found {
        Found {
            name: name.to_owned(),
            version: None,
            holder: Some(holder.to_owned()),
            end: Some(now() + SignedDuration::from_hours(1)),
            seconds: Some(3600),
        }
    }

    /// Limit (sizes): Leases of servers that an agent reads | 1,024, with names and holders of at most 253 bytes;
    /// others are skipped
    #[test]
    fn at_most_1024_leases_with_holders_of_253_bytes_are_kept() {
        let (out, leased) = watch::channel(None);
        let mut view = View {
            leases: BTreeMap::new(),
            out,
            warned: Arc::default(),
        };
        let holder = |bytes| "h".repeat(bytes);
        view.apply(lease("long", &holder(NAME_BYTES_MAX + 1)));
        view.apply(lease(&holder(NAME_BYTES_MAX + 1), "long"));
        assert!(view.leases.is_empty() && view.warned.load(Relaxed));
        for number in 0..2 * LEASES_MAX {
            view.apply(lease(&format!("l{number}"), &format!("h{number}")));
        }
        assert_eq!(view.leases.len(), LEASES_MAX);
        // A kept lease may change, but is dropped when its new holder is too long.
        view.apply(lease("l0", &holder(NAME_BYTES_MAX)));
        view.apply(lease("l1", &holder(NAME_BYTES_MAX + 1)));
        assert_eq!(view.leases.len(), LEASES_MAX - 1);
        view.publish();
        let leased = leased.borrow().clone().unwrap();
        assert!(leased.contains(&holder(NAME_BYTES_MAX)) && !leased.contains("h1"));
    }
}
