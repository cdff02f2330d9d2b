//! Values of what becomes of calls and links of agents.

use super::Label;

label! {
    /// Why an agent's call was refused.
    AgentRefusal {
        /// Its metadata cannot be read.
        Metadata = "metadata",
        /// Its token is missing, or is not let in.
        Token = "token",
        /// The Kubernetes API did not say whose its token is.
        NotReviewed = "not_reviewed",
        /// The deny list names it.
        Denied = "denied",
        /// Its certificate was let in, and is not any more.
        Certificate = "certificate",
        /// It is not granted the id or an identifier.
        NotGranted = "not_granted",
        /// Its owner holds as many links of that id as it may.
        LinksPerAgent = "links_per_agent",
        /// This process has no room for another link.
        Process = "process",
    }
}

label! {
    /// Why a server has ended a link.
    LinkEnding {
        /// The deny list names its agent.
        Denied = "denied",
        /// The certificate of its agent is not accepted any more.
        Certificate = "certificate",
        /// Somebody asked for it on the admin socket.
        Unlinked = "unlinked",
        /// Its agent took no control packets: their queue ran full.
        ControlQueue = "control_queue",
    }
}

label! {
    /// What came of a review of an agent's token.
    TokenReview {
        /// The agent is let in.
        Ok = "ok",
        /// It is not.
        Denied = "denied",
        /// The Kubernetes API could not be asked, or its answer is of no use.
        Error = "error",
        /// It did not answer in time.
        Timeout = "timeout",
        /// It was not asked: too many agents waited.
        Overload = "overload",
    }
}
