//! The lease of this server: acquired, renewed, withdrawn.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{EVERY, LEASE_SECONDS, LeaseScope, name_of, now};
use crate::access::Api;
use crate::request::{RequestError, send};

/// Share of the time between two renewals that is added at random.
const JITTER: f64 = 0.04;
/// Attempts to write one renewal.
const TRIES: usize = 5;
/// Pauses between attempts to acquire the lease, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(7));
/// Time to withdraw the lease.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(2);

/// Keeps the lease of one server.
pub struct Publisher {
    api: Arc<Api>,
    scope: LeaseScope,
    labels: BTreeMap<String, String>,
    server_id: String,
    name: String,
}

impl Publisher {
    /// A publisher for a server; `labels` are for its lease. Writes nothing yet.
    #[must_use]
    pub fn new(
        api: Arc<Api>,
        scope: LeaseScope,
        labels: BTreeMap<String, String>,
        server_id: &str,
    ) -> Self {
        Self {
            api,
            scope,
            labels,
            server_id: server_id.to_owned(),
            name: name_of(server_id),
        }
    }

    /// Acquires the lease and renews it until `stop`, then withdraws it, within two seconds. An API server that is away
    /// blocks nothing: requests are repeated.
    pub async fn run(&self, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep()).await;
        let (api, path) = (&*self.api, self.scope.path_of(&self.name));
        let withdrawn = send::<(), Value>(api, Method::DELETE, &path, None);
        let error = match tokio::time::timeout(WITHDRAWN_WITHIN, withdrawn).await {
            Ok(Ok(_status)) => return tracing::info!(lease = self.name, "the lease is withdrawn"),
            Ok(Err(error)) if error.status() == Some(StatusCode::NOT_FOUND) => return,
            Ok(Err(error)) => error,
            Err(_elapsed) => RequestError::TimedOut,
        };
        tracing::warn!(
            lease = self.name,
            %error,
            "cannot withdraw the lease: agents look for this server until it expires, {LEASE_SECONDS} s after its last renewal"
        );
    }

    async fn keep(&self) {
        let mut latest: Option<Lease> = None;
        loop {
            let renewed = match &latest {
                Some(lease) => self.renew(lease).await,
                None => None,
            };
            latest = Some(match renewed {
                Some(lease) => lease,
                None => self.acquire().await,
            });
            tokio::time::sleep(EVERY.mul_f64(1.0 + JITTER * rand::random::<f64>())).await;
        }
    }

    /// Takes over the existing lease, or creates one.
    async fn acquire(&self) -> Lease {
        let (mut pause, longest) = PAUSES;
        let mut is_told = false;
        loop {
            match self.get_or_create().await {
                Ok(lease) => {
                    tracing::info!(
                        lease = self.name,
                        namespace = self.scope.namespace,
                        "the lease is published"
                    );
                    return lease;
                }
                // Logged once.
                Err(error) if !std::mem::replace(&mut is_told, true) => tracing::error!(
                    lease = self.name,
                    namespace = self.scope.namespace,
                    api_server = self.api.address(),
                    %error,
                    "cannot publish the lease: agents that count leases do not look for this server; retrying"
                ),
                Err(_again) => (),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    async fn get_or_create(&self) -> Result<Lease, RequestError> {
        let path = self.scope.path_of(&self.name);
        match self.get(&path).await {
            Ok(found) => self.put(&found).await,
            Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => {
                let lease = self.lease(None);
                let path = self.scope.path();
                let created = send(&self.api, Method::POST, &path, Some(&lease)).await;
                created.map(readable)
            }
            Err(error) => Err(error),
        }
    }

    async fn get(&self, path: &str) -> Result<Lease, RequestError> {
        let found = send::<(), Value>(&self.api, Method::GET, path, None).await;
        found.map(readable)
    }

    /// `None`: the lease has to be acquired anew.
    async fn renew(&self, latest: &Lease) -> Option<Lease> {
        let mut latest = latest.clone();
        for _try in 0..TRIES {
            match self.put(&latest).await {
                Ok(lease) => return Some(lease),
                Err(error) if error.status() == Some(StatusCode::CONFLICT) => {
                    let path = self.scope.path_of(&self.name);
                    latest = self.get(&path).await.ok()?;
                }
                Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => return None,
                Err(error) => tracing::debug!(lease = self.name, %error, "cannot renew the lease"),
            }
        }
        None
    }

    /// Overwrites the version `latest`.
    async fn put(&self, latest: &Lease) -> Result<Lease, RequestError> {
        let path = self.scope.path_of(&self.name);
        let lease = self.lease(Some(latest));
        let written = send(&self.api, Method::PUT, &path, Some(&lease)).await;
        written.map(readable)
    }

    /// The lease to write: of this server, and renewed now.
    fn lease(&self, latest: Option<&Lease>) -> Lease {
        let now = MicroTime(now());
        let old = latest
            .and_then(|lease| lease.spec.clone())
            .unwrap_or_default();
        let is_ours = old.holder_identity.as_ref() == Some(&self.server_id);
        Lease {
            metadata: ObjectMeta {
                labels: Some(self.labels.clone()),
                ..latest.map_or_else(
                    || ObjectMeta {
                        name: Some(self.name.clone()),
                        namespace: Some(self.scope.namespace.clone()),
                        ..ObjectMeta::default()
                    },
                    |lease| lease.metadata.clone(),
                )
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.server_id.clone()),
                lease_duration_seconds: Some(LEASE_SECONDS),
                acquire_time: old
                    .acquire_time
                    .filter(|_since| is_ours)
                    .or_else(|| Some(now.clone())),
                renew_time: Some(now),
                ..old
            }),
        }
    }
}

/// A lease, to be overwritten. Of one that cannot be read, what is needed for that: a stranger's values must not keep a server
/// from its own lease.
fn readable(object: Value) -> Lease {
    serde_json::from_value(object.clone()).unwrap_or_else(|_unreadable| {
        let text = |field: &str| object["metadata"][field].as_str().map(str::to_owned);
        Lease {
            metadata: ObjectMeta {
                name: text("name"),
                namespace: text("namespace"),
                resource_version: text("resourceVersion"),
                ..ObjectMeta::default()
            },
            spec: None,
        }
    })
}
