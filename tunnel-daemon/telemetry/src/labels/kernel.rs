//! Label values for the redirect and for kernel accounting.

use super::Label;

label! {
    /// State of the eBPF redirect.
    RedirectState {
        /// Not configured.
        Off = "off",
        /// Programs are attached.
        Active = "active",
        /// Configured, but something it needs is missing.
        Missing = "missing",
    }
}

label! {
    /// State of the helper that opens listeners in other network namespaces.
    NetnsHelperState {
        /// Not configured.
        Off = "off",
        /// The helper runs.
        Running = "running",
        /// Configured, but the helper lacks something it needs.
        Missing = "missing",
        /// The helper has ended, or does not answer.
        Ended = "ended",
    }
}

label! {
    /// State of another network namespace in the redirect.
    NetnsState {
        /// It has a listener.
        Captured = "captured",
        /// It cannot be entered, or a listener cannot be opened in it.
        Failed = "failed",
        /// The number of namespaces is at its limit.
        OverLimit = "over_limit",
    }
}

label! {
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
}

label! {
    /// Why a connection to a transparent listener was closed.
    RedirectRefusal {
        /// Its original destination is unknown, or is known no more.
        UnknownOrigin = "unknown_origin",
        /// Its destination is the listener itself.
        OwnAddress = "own_address",
        /// The kernel did not tell the original destination.
        Kernel = "kernel",
    }
}

label! {
    /// Why kernel accounting lost the end of a connection.
    AccountLoss {
        /// The ring buffer was full.
        RingFull = "ring_full",
        /// It ended before it had labels, or its entry was evicted.
        Unknown = "unknown",
    }
}
