//! Label values for calls and links of agents.

use super::Label;

label! {
    /// Why an agent's call was refused.
    AgentRefusal {
        /// The metadata of the call cannot be read.
        Metadata = "metadata",
        /// The agent's token is missing or not accepted.
        Token = "token",
        /// The Kubernetes API did not review the agent's token.
        NotReviewed = "not_reviewed",
        /// The deny list names the agent.
        Denied = "denied",
        /// The agent's certificate was accepted before and is no longer accepted.
        Certificate = "certificate",
        /// The agent id or an identifier is not granted to the agent.
        NotGranted = "not_granted",
        /// The number of links of this agent id is at its limit.
        LinksPerAgent = "links_per_agent",
        /// This process has no room for another link.
        Process = "process",
    }

    /// Why this process has ended a link.
    LinkEnding {
        /// The deny list names the agent of the link.
        Denied = "denied",
        /// The certificate of the agent is no longer accepted.
        Certificate = "certificate",
        /// A request on the admin socket closed the link.
        Unlinked = "unlinked",
        /// The peer did not read, and what waited for it took too much memory.
        ControlQueue = "control_queue",
    }

    /// Outcome of a review of an agent's token.
    TokenReview {
        /// The agent is admitted.
        Ok = "ok",
        /// The agent is refused.
        Denied = "denied",
        /// The Kubernetes API gave no valid answer.
        Error = "error",
        /// The Kubernetes API did not answer in time.
        Timeout = "timeout",
        /// The token was not reviewed: too many reviews were waiting.
        Overload = "overload",
    }

    /// How a dial ended at the agent that was asked.
    AgentDial {
        /// The agent answered within a second: the target is open, or has refused.
        Answered = "answered",
        /// The agent needed more than a second, or had not answered after a second when the dial was given up.
        Slow = "slow",
        /// The dial failed, except by a refusal of the target.
        Failed = "failed",
    }
}
