//! Label values for calls and links of agents.

use super::Label;

label! {
    /// Why an agent's call was refused.
    AgentRefusal {
        /// Its metadata cannot be read.
        Metadata = "metadata",
        /// Its token is missing or not accepted.
        Token = "token",
        /// The Kubernetes API did not review its token.
        NotReviewed = "not_reviewed",
        /// The deny list names it.
        Denied = "denied",
        /// Its certificate was accepted before and no longer is.
        Certificate = "certificate",
        /// It is not granted the id or an identifier.
        NotGranted = "not_granted",
        /// The number of links of this id is at its limit.
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
        /// Closed by a request on the admin socket.
        Unlinked = "unlinked",
        /// Its agent read no control packets, and their queue ran full.
        ControlQueue = "control_queue",
    }
}

label! {
    /// Outcome of a review of an agent's token.
    TokenReview {
        /// The agent is let in.
        Ok = "ok",
        /// The agent is refused.
        Denied = "denied",
        /// The Kubernetes API gave no valid answer.
        Error = "error",
        /// It did not answer in time.
        Timeout = "timeout",
        /// Not asked: too many reviews were waiting.
        Overload = "overload",
    }
}
