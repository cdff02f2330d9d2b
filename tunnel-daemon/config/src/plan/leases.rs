//! Leases of servers: servers publish them, and agents count them.

use std::collections::BTreeMap;

use adit_kube::access::Source;
use adit_kube::leases::{LeaseScope, is_valid_id, parse_labels};

use crate::error::{ConfigError, bail};

/// Which count of servers is used when leases exist and servers announce a count, too.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CountSource {
    /// The number of leases.
    #[default]
    Leases,
    /// The larger of the two counts.
    Larger,
}

/// A server that publishes a lease, and deletes expired ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublishPlan {
    /// Namespace and selector of the leases, including those that are deleted.
    pub scope: LeaseScope,
    /// Labels of the lease.
    pub labels: BTreeMap<String, String>,
    /// Access to the Kubernetes API.
    pub api: Source,
}

/// An agent that counts servers by their leases.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CountPlan {
    /// Namespace and selector of the counted leases.
    pub scope: LeaseScope,
    /// Access to the Kubernetes API.
    pub api: Source,
    /// Which count is used.
    pub source: CountSource,
}

impl PublishPlan {
    /// From the flags of a server.
    ///
    /// # Errors
    /// Invalid labels, or a server id that cannot be part of a lease's name.
    pub fn of_flags(
        namespace: &str,
        label: &str,
        kubeconfig: &str,
        server_id: &str,
    ) -> Result<Self, ConfigError> {
        let labels = parse_labels(label).map_err(|error| {
            ConfigError::new(format!(
                "--lease-label {label:?}: {error}; write such as k8s-app=konnectivity-server"
            ))
        })?;
        if !is_valid_id(server_id) {
            bail!(
                "--server-id {server_id:?} cannot be part of the name of a lease: give one of lower-case letters, digits, '-' \
                 and '.', that begins and ends with a letter or digit"
            );
        }
        let pairs: Vec<String> = labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        Ok(Self {
            scope: LeaseScope {
                namespace: namespace.to_owned(),
                selector: pairs.join(","),
            },
            labels,
            api: Source::of_flag(kubeconfig),
        })
    }
}

impl CountPlan {
    /// From the flags of an agent; `source` is the value of `--server-count-source`.
    ///
    /// # Errors
    /// An invalid source, in upstream's words.
    pub fn of_flags(
        namespace: &str,
        selector: &str,
        kubeconfig: &str,
        source: &str,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            scope: LeaseScope {
                namespace: namespace.to_owned(),
                selector: selector.to_owned(),
            },
            api: Source::of_flag(kubeconfig),
            source: count_source(source)?,
        })
    }
}

/// The value of `--server-count-source`.
///
/// # Errors
/// An invalid value, in upstream's words.
pub fn count_source(text: &str) -> Result<CountSource, ConfigError> {
    match text {
        "" | "default" => Ok(CountSource::Leases),
        "max" => Ok(CountSource::Larger),
        other => Err(ConfigError::new(format!(
            "--server-count-source must be one of '', 'default', 'max', got {other}"
        ))),
    }
}
