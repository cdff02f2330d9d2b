//! Leases of servers: published by them, and counted by agents.

use std::collections::BTreeMap;

use adit_kube::access::Source;
use adit_kube::leases::{LeaseScope, is_valid_id, parse_labels};

use crate::error::{ConfigError, bail};

/// Which number of servers counts, where leases are counted as well as announced by servers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CountSource {
    /// That of leases.
    #[default]
    Leases,
    /// The larger one.
    Larger,
}

/// A server that publishes a lease, and collects expired ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublishPlan {
    /// Where, and which are collected.
    pub scope: LeaseScope,
    /// Labels of the lease.
    pub labels: BTreeMap<String, String>,
    /// Who keeps it.
    pub api: Source,
}

/// An agent that counts servers by their leases.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CountPlan {
    /// Which count.
    pub scope: LeaseScope,
    /// Who knows them.
    pub api: Source,
    /// What counts beside them.
    pub source: CountSource,
}

impl PublishPlan {
    /// From the flags of a server.
    ///
    /// # Errors
    /// Labels that are none, or a server id that can be no part of a lease's name.
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
    /// A source that is none, in upstream's words.
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
/// It is none, in upstream's words.
pub fn count_source(text: &str) -> Result<CountSource, ConfigError> {
    match text {
        "" | "default" => Ok(CountSource::Leases),
        "max" => Ok(CountSource::Larger),
        other => Err(ConfigError::new(format!(
            "--server-count-source must be one of '', 'default', 'max', got {other}"
        ))),
    }
}
