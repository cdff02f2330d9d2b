//! Authentication of agents by their service account tokens.

use adit_kube::access::Source;
use adit_kube::review_policy::ReviewPolicy;
use adit_kube::reviewer::Rate;

use crate::error::{ConfigError, bail};

/// What an agent has to prove where tokens are reviewed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum AgentProof {
    /// A certificate or a token. What is shown must hold.
    Either,
    /// A certificate and a token.
    Both,
}

/// Review of agents' tokens.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenPlan {
    /// Which tokens are accepted.
    pub policy: ReviewPolicy,
    /// Access to the Kubernetes API, which reviews them.
    pub api: Source,
    /// Rate limit of reviews.
    pub rate: Rate,
    /// Whether a certificate is required, too.
    pub proof: AgentProof,
}

impl TokenPlan {
    /// `None`: all three names are empty, so tokens are not used. The rules for these flags are upstream's.
    ///
    /// # Errors
    /// Some names are empty, by flag; or all are, where both proofs are required.
    pub fn of_flags(
        namespace: &str,
        service_account: &str,
        audience: &str,
        kubeconfig: &str,
        rate: Rate,
        proof: AgentProof,
    ) -> Result<Option<Self>, ConfigError> {
        let flags = [
            ("--agent-namespace", namespace),
            ("--agent-service-account", service_account),
            ("--authentication-audience", audience),
        ];
        if flags.iter().all(|(_flag, value)| value.is_empty()) {
            // A security flag is never accepted without effect.
            return match proof {
                AgentProof::Either => Ok(None),
                AgentProof::Both => Err(ConfigError::new(
                    "--agent-proof=both asks agents for tokens, too: give --agent-namespace, --agent-service-account and \
                     --authentication-audience",
                )),
            };
        }
        if let Some((flag, _empty)) = flags.iter().find(|(_flag, value)| value.is_empty()) {
            bail!("{flag} cannot be empty when agent authentication is enabled");
        }
        Ok(Some(Self {
            policy: ReviewPolicy {
                namespace: namespace.to_owned(),
                service_account: service_account.to_owned(),
                audience: audience.to_owned(),
            },
            api: Source::of_flag(kubeconfig),
            rate,
            proof,
        }))
    }
}
