//! Values of the redirect and of accounting in the kernel.

use super::Label;

label! {
    /// What the redirect by eBPF is.
    RedirectState {
        /// Not asked for.
        Off = "off",
        /// Programs are attached.
        Active = "active",
        /// Asked for, and something is missing.
        Missing = "missing",
    }
}

label! {
    /// How the helper is that opens listeners in other network namespaces.
    NetnsHelperState {
        /// Not asked for.
        Off = "off",
        /// It works.
        Running = "running",
        /// Asked for, and it lacks something.
        Missing = "missing",
        /// It has ended, or does not answer.
        Ended = "ended",
    }
}

label! {
    /// What another network namespace is to the redirect.
    NetnsState {
        /// It has a listener.
        Captured = "captured",
        /// It has none: it cannot be entered or listened in.
        Failed = "failed",
        /// It is one more than there may be.
        OverLimit = "over_limit",
    }
}

label! {
    /// What a connection is to its tunnels, as accounted for in the kernel.
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
        /// Nothing tells where it wanted to go, or it waited too long.
        UnknownOrigin = "unknown_origin",
        /// It wanted to go to the listener itself.
        OwnAddress = "own_address",
        /// The kernel refused to tell.
        Kernel = "kernel",
    }
}

label! {
    /// What became of the end of a connection that the kernel accounts for.
    AccountLoss {
        /// The ring buffer was full.
        RingFull = "ring_full",
        /// It ended before it was known what it is, or its entry had to make room.
        Unknown = "unknown",
    }
}
