//! Flags of earlier or later upstream releases that have no effect in this program.
//!
//! They are skipped with a warning, so that manifests written for those releases work.

/// One ignored flag, which takes a value.
#[derive(Debug)]
pub(super) struct Retired {
    pub(super) name: &'static str,
    pub(super) why: &'static str,
}

/// Ignored flags of `proxy-server`.
pub(super) const SERVER: &[Retired] = &[Retired {
    name: "frontend-write-channel-size",
    why: "added after v0.36.0; slow clients are bounded in bytes here, not in packets",
}];

/// Ignored flags of `proxy-agent`.
pub(super) const AGENT: &[Retired] = &[
    Retired {
        name: "reconnect-interval",
        why: "only early releases had it; --sync-interval and --sync-interval-cap pace reconnects",
    },
    Retired {
        name: "feature-gates",
        why: "the only gate was NodeToMasterTraffic, which never came to be",
    },
    Retired {
        name: "apiserver-mapping",
        why: "it belonged to the NodeToMasterTraffic gate, which never came to be",
    },
    Retired {
        name: "apiserver-port-mapping",
        why: "it belonged to the NodeToMasterTraffic gate, which never came to be",
    },
    Retired {
        name: "bind-address",
        why: "it belonged to the NodeToMasterTraffic gate, which never came to be",
    },
];
