//! Label values for the redirect and for kernel accounting.

use super::Label;

label! {
    /// State of the eBPF redirect.
    RedirectState {
        /// The redirect is not configured.
        Off = "off",
        /// The eBPF programs are attached.
        Active = "active",
        /// The redirect is configured, but a requirement is missing.
        Missing = "missing",
    }

    /// State of the helper that opens listeners in other network namespaces.
    NetnsHelperState {
        /// The helper is not configured.
        Off = "off",
        /// The helper runs.
        Running = "running",
        /// The helper is configured, but lacks a requirement.
        Missing = "missing",
        /// The helper has ended or does not answer.
        Ended = "ended",
    }

    /// State of another network namespace in the redirect.
    NetnsState {
        /// The namespace has a listener.
        Captured = "captured",
        /// The namespace cannot be entered, or a listener cannot be opened in the namespace.
        Failed = "failed",
        /// The namespace has no listener because the number of namespaces is at its limit.
        OverLimit = "over_limit",
    }

    /// The role of a connection in kernel accounting.
    AccountRole {
        /// From an agent to a target, or from a server to a destination of the control plane.
        Target = "target",
        /// From a client to a frontend, with one tunnel.
        Client = "client",
        /// From a client to a frontend, with any number of tunnels.
        GrpcClient = "grpc-client",
        /// A lane.
        Lane = "lane",
        /// A link.
        Link = "link",
    }

    /// Why a connection to a transparent listener was closed.
    RedirectRefusal {
        /// The original destination is unknown, or its record has expired.
        UnknownOrigin = "unknown_origin",
        /// The original destination is the listener itself.
        OwnAddress = "own_address",
        /// The kernel did not report the original destination.
        Kernel = "kernel",
    }

    /// Why kernel accounting lost the end of a connection.
    AccountLoss {
        /// The ring buffer was full.
        RingFull = "ring_full",
        /// The connection ended before it had labels, or its entry was evicted.
        Unknown = "unknown",
    }
}
