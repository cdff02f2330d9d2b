//! The addresses of a cluster's Services (`v1`), as a watch tells them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::access::{Api, Source};
use crate::request::{
    Lines, PageMeta, RequestError, escape, excerpt, get_at_most, watch as begin_watch,
};

/// Services that are kept: more than large clusters have.
const SERVICES_MAX: usize = 50_000;
/// Services of a page of a list; a Service has some kilobytes with its annotations.
const PAGE: usize = 500;
/// Longest page.
const PAGE_BYTES_MAX: usize = 8 << 20;
/// The API server ends a watch after so many seconds, and a new one begins.
const WATCH_SECONDS: u64 = 300;
/// Longest silence of a watch: its whole time, and a margin.
const SILENCE_MAX: Duration = Duration::from_secs(WATCH_SECONDS + 30);
/// Pauses between attempts, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// Namespace, and addresses by the name of the Service.
type ByName = HashMap<String, Vec<IpAddr>>;

/// Services with an address of their own, by namespace and name. Clones share them.
#[derive(Clone, Debug)]
pub struct Services(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    known: Mutex<Known>,
    /// Whether a list was read.
    listed: watch::Sender<bool>,
}

#[derive(Default, Debug)]
struct Known {
    by_namespace: HashMap<String, ByName>,
    count: usize,
    warned: bool,
}

impl Default for Services {
    fn default() -> Self {
        Self(Arc::new(Shared {
            known: Mutex::default(),
            listed: watch::channel(false).0,
        }))
    }
}

impl Services {
    /// The addresses of a Service; empty if there is none, or it has none of its own.
    #[must_use]
    pub fn addresses(&self, namespace: &str, name: &str) -> Vec<IpAddr> {
        let known = self.known();
        let found = known
            .by_namespace
            .get(namespace)
            .and_then(|names| names.get(name));
        found.cloned().unwrap_or_default()
    }

    /// Waits for the first list, at most for `limit`. False: there is none yet.
    pub async fn listed(&self, limit: Duration) -> bool {
        let mut listed = self.0.listed.subscribe();
        let waited = tokio::time::timeout(limit, listed.wait_for(|listed| *listed)).await;
        waited.is_ok_and(|listed| listed.is_ok())
    }

    /// Lists and watches for ever. While the API does not answer, the last state stands.
    pub async fn follow(self, source: Source) {
        let (first, longest) = PAUSES;
        let (mut pause, mut is_away) = (first, false);
        loop {
            let began = Instant::now();
            let failed = match Api::open(source.clone()).await {
                Ok(api) => self.watch(&api, &mut is_away).await,
                Err(error) => error.to_string(),
            };
            if !std::mem::replace(&mut is_away, true) {
                tracing::error!(
                    error = failed,
                    "cannot watch the Services of the cluster: those known so far stay in use; retrying"
                );
            }
            pause = if began.elapsed() > longest {
                first
            } else {
                (pause * 2).min(longest)
            };
            tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
        }
    }

    /// Watches until that fails; returns why.
    async fn watch(&self, api: &Api, is_away: &mut bool) -> String {
        loop {
            let version = match self.list(api).await {
                Ok(version) => version,
                Err(error) => return error.to_string(),
            };
            if std::mem::take(is_away) {
                tracing::info!("the Services of the cluster are watched again");
            }
            match self.follow_from(api, version).await {
                // The state from which the watch went on is too old.
                Err(error) if error.status() == Some(StatusCode::GONE) => {
                    tokio::time::sleep(PAUSES.0).await;
                }
                Err(error) => return error.to_string(),
                Ok(()) => (),
            }
        }
    }

    /// Follows watches, one after the other, from this version of the list on.
    async fn follow_from(&self, api: &Api, mut version: String) -> Result<(), RequestError> {
        loop {
            let path = format!(
                "{PATH}?watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={}",
                escape(&version)
            );
            let (began, mut lines) = (Instant::now(), begin_watch(api, &path).await?);
            while let Some(event) = next(&mut lines).await? {
                let Ok(event) = event else {
                    // One that cannot be read is skipped.
                    continue;
                };
                if event.kind == "ERROR" {
                    // Usually it is too old a version: everything is listed again.
                    tracing::debug!(
                        error = excerpt(&event.object.message),
                        "a watch of Services ended"
                    );
                    tokio::time::sleep_until(began + PAUSES.1).await;
                    return Ok(());
                }
                if let Some(seen) = event.object.metadata.version.clone() {
                    version = seen;
                }
                match event.kind.as_str() {
                    "ADDED" | "MODIFIED" => self.known().keep(event.object),
                    "DELETED" => self.known().remove(&event.object.metadata),
                    _ => (),
                }
            }
            // A watch that ends at once, as behind a proxy that does not stream, does not begin again at once.
            tokio::time::sleep_until(began + PAUSES.1).await;
        }
    }

    /// Reads all Services; returns the version of the list.
    async fn list(&self, api: &Api) -> Result<String, RequestError> {
        let (mut fresh, mut next, mut limit) = (Known::default(), String::new(), PAGE);
        loop {
            let path = format!("{PATH}?limit={limit}{next}");
            let page: Page = match get_at_most(PAGE_BYTES_MAX, api, &path).await {
                Err(RequestError::TooLong(_)) if limit > 1 => {
                    limit = (limit / 10).max(1);
                    continue;
                }
                page => page?,
            };
            for item in page.items.unwrap_or_default() {
                match serde_json::from_value(item) {
                    Ok(service) => fresh.keep(service),
                    Err(error) => {
                        tracing::debug!(%error, "a Service cannot be read and is skipped")
                    }
                }
            }
            match page.metadata.rest.filter(|rest| !rest.is_empty()) {
                Some(rest) => next = format!("&continue={}", escape(&rest)),
                None => {
                    *self.known() = fresh;
                    self.0.listed.send_replace(true);
                    return Ok(page.metadata.version.unwrap_or_default());
                }
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing panics while the lock is held.
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const PATH: &str = "/api/v1/services";

/// The next event, or why its line cannot be used.
async fn next(lines: &mut Lines) -> Result<Option<Result<Event, RequestError>>, RequestError> {
    let next = tokio::time::timeout(SILENCE_MAX, lines.next::<Event>()).await;
    next.unwrap_or(Err(RequestError::TimedOut))
}

impl Known {
    /// Keeps a Service, unless it has no address of its own or there are too many.
    fn keep(&mut self, service: Service) {
        let addresses = service.spec.addresses();
        if addresses.is_empty() {
            return self.remove(&service.metadata);
        }
        let Meta {
            namespace, name, ..
        } = service.metadata;
        let known = self.by_namespace.get(&namespace);
        let is_new = !known.is_some_and(|names| names.contains_key(&name));
        if is_new && self.count >= SERVICES_MAX {
            if !std::mem::replace(&mut self.warned, true) {
                tracing::warn!(
                    "there are more than {SERVICES_MAX} Services: the names of the others are not known"
                );
            }
            return;
        }
        self.count += usize::from(is_new);
        let names = self.by_namespace.entry(namespace).or_default();
        names.insert(name, addresses);
    }

    fn remove(&mut self, service: &Meta) {
        if let Some(names) = self.by_namespace.get_mut(&service.namespace)
            && names.remove(&service.name).is_some()
        {
            self.count -= 1;
            if names.is_empty() {
                self.by_namespace.remove(&service.namespace);
            }
        }
    }
}

/// What matters of a Service; an error of a watch has a message in its place.
#[derive(Deserialize)]
struct Service {
    #[serde(default)]
    metadata: Meta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    message: String,
}

#[derive(Deserialize, Default)]
struct Meta {
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(rename = "resourceVersion")]
    version: Option<String>,
}

#[derive(Deserialize, Default)]
struct Spec {
    #[serde(rename = "clusterIP")]
    address: Option<String>,
    #[serde(rename = "clusterIPs")]
    addresses: Option<Vec<String>>,
}

impl Spec {
    /// Headless Services have the address `None`.
    fn addresses(&self) -> Vec<IpAddr> {
        let all = self.addresses.as_deref().unwrap_or_default().iter();
        let all: Vec<IpAddr> = all.filter_map(|text| text.parse().ok()).collect();
        if all.is_empty() {
            let one = self.address.as_deref().and_then(|text| text.parse().ok());
            return one.into_iter().collect();
        }
        all
    }
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Service,
}

#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: PageMeta,
    items: Option<Vec<Value>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(json: &str) -> Service {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn services_with_addresses_of_their_own_are_known() {
        let services = Services::default();
        for json in [
            r#"{"metadata":{"namespace":"a","name":"web","resourceVersion":"7"},"spec":{"clusterIP":"10.0.0.1","clusterIPs":["10.0.0.1","fd00::1"]}}"#,
            r#"{"metadata":{"namespace":"a","name":"old"},"spec":{"clusterIP":"10.0.0.2"}}"#,
            r#"{"metadata":{"namespace":"b","name":"headless"},"spec":{"clusterIP":"None","clusterIPs":["None"]}}"#,
            r#"{"metadata":{"namespace":"b","name":"external"},"spec":{"type":"ExternalName"}}"#,
        ] {
            services.known().keep(service(json));
        }
        let web: Vec<IpAddr> = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(services.addresses("a", "web"), web);
        assert_eq!(services.addresses("a", "old").len(), 1);
        for (namespace, name) in [
            ("b", "headless"),
            ("b", "external"),
            ("b", "web"),
            ("c", "web"),
        ] {
            assert!(
                services.addresses(namespace, name).is_empty(),
                "{namespace}/{name}"
            );
        }
        assert_eq!(services.known().count, 2);
        // One that becomes headless is gone, as one that is deleted.
        services.known().keep(service(
            r#"{"metadata":{"namespace":"a","name":"web"},"spec":{"clusterIP":"None"}}"#,
        ));
        let old = service(r#"{"metadata":{"namespace":"a","name":"old"}}"#);
        services.known().remove(&old.metadata);
        assert!(services.known().by_namespace.is_empty() && services.known().count == 0);
    }

    /// Limit (memory): Services known by name to a proxy | 50,000; further ones are not known
    #[test]
    fn services_beyond_fifty_thousand_are_not_kept() {
        let mut known = Known::default();
        let one = |number: usize| {
            service(&format!(
                r#"{{"metadata":{{"namespace":"n","name":"s{number}"}},"spec":{{"clusterIP":"10.0.0.1"}}}}"#
            ))
        };
        (0..SERVICES_MAX + 2).for_each(|number| known.keep(one(number)));
        assert_eq!(known.count, 50_000);
        known.keep(one(1));
        assert_eq!(known.count, 50_000, "one that is known may change");
    }
}
