//! The identity that an agent has proved.

use std::sync::Arc;

use adit_core::grant::{Account, Holder};
use adit_kube::account::ServiceAccount;
use rustls_pki_types::{CertificateDer, UnixTime};

use crate::principal::Principal;

/// What an agent has proved. Clones are cheap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AgentIdentity {
    /// By its certificate.
    Certificate(Certificate),
    /// By a token that the Kubernetes API has reviewed.
    ServiceAccount {
        /// The account, with the pod and node that its token is bound to.
        account: Arc<ServiceAccount>,
        /// Owner of the agent's claims: ids, quota share and lanes.
        owner: Arc<str>,
        /// The certificate that the agent has shown as well.
        certificate: Option<Certificate>,
    },
    /// The agent has proved nothing, and did not have to.
    Unverified,
}

/// A verified certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Certificate {
    principal: Arc<Principal>,
    holder: Arc<str>,
    chain: Arc<[CertificateDer<'static>]>,
    verified: UnixTime,
}

impl Certificate {
    /// The chain that a TLS peer has shown, its own certificate first, and when the chain was verified.
    #[must_use]
    pub fn new(
        principal: Arc<Principal>,
        chain: &[CertificateDer<'static>],
        verified: UnixTime,
    ) -> Self {
        let holder = principal.holder().into();
        Self {
            principal,
            holder,
            chain: chain.into(),
            verified,
        }
    }

    /// The chain, own certificate first, and when it was verified.
    #[must_use]
    pub fn shown(&self) -> (&[CertificateDer<'static>], UnixTime) {
        (&self.chain, self.verified)
    }

    /// The holder of the certificate, see [`Principal::holder`].
    #[must_use]
    pub fn holder(&self) -> &Arc<str> {
        &self.holder
    }

    /// The names of the certificate.
    #[must_use]
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    fn as_grants_know_it(&self) -> Holder<'_> {
        Holder::Certificate(self.principal.names())
    }
}

impl AgentIdentity {
    /// The identity by certificate alone, if there is one.
    #[must_use]
    pub fn of_certificate(certificate: Option<Certificate>) -> Self {
        certificate.map_or(Self::Unverified, Self::Certificate)
    }

    /// The identity by token, and by certificate if there is one.
    #[must_use]
    pub fn of_account(account: Arc<ServiceAccount>, certificate: Option<Certificate>) -> Self {
        let owner = account.owner().into();
        Self::ServiceAccount {
            account,
            owner,
            certificate,
        }
    }

    /// The owner of this agent's claims, to compare and to log: its agent ids, its share of a quota, its lanes. The same
    /// for other links of the agent, and across renewals of certificate and token. `None`: unverified.
    #[must_use]
    pub fn owner(&self) -> Option<&Arc<str>> {
        match self {
            Self::Certificate(certificate) => Some(&certificate.holder),
            Self::ServiceAccount { owner, .. } => Some(owner),
            Self::Unverified => None,
        }
    }

    /// The holders that grants name.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder<'_>> {
        match self {
            Self::Certificate(certificate) => vec![certificate.as_grants_know_it()],
            Self::ServiceAccount {
                account,
                certificate,
                ..
            } => {
                let token = Holder::ServiceAccount(Account {
                    namespace: &account.namespace,
                    name: &account.name,
                    node: account.node_name.as_deref(),
                    pod: account.pod_uid.as_deref(),
                });
                certificate
                    .iter()
                    .map(Certificate::as_grants_know_it)
                    .chain([token])
                    .collect()
            }
            Self::Unverified => Vec::new(),
        }
    }

    /// The certificate that the agent has shown.
    #[must_use]
    pub fn certificate(&self) -> Option<&Certificate> {
        match self {
            Self::Certificate(certificate) => Some(certificate),
            Self::ServiceAccount { certificate, .. } => certificate.as_ref(),
            Self::Unverified => None,
        }
    }

    /// Whether a connection may become a lane of this agent's link. `holder` is the holder of the certificate of its TLS
    /// session: it must be the link's, or `None` where the link has shown none. The lane still has to prove the link's
    /// secret.
    #[must_use]
    pub fn may_bind(&self, holder: Option<&str>) -> bool {
        match self {
            Self::Unverified => false,
            _ => holder == self.certificate().map(|shown| shown.holder.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(name: &str) -> Certificate {
        let principal = Principal {
            subject: format!("CN={name}"),
            common_name: Some(name.to_owned()),
            names: Vec::new(),
            rest_sha256: None,
            certificate_sha256: [0; 32],
        };
        Certificate::new(Arc::new(principal), &[], UnixTime::now())
    }

    fn account(node: &str) -> Arc<ServiceAccount> {
        Arc::new(ServiceAccount {
            namespace: "n".to_owned(),
            name: "s".to_owned(),
            pod_uid: Some("uid".to_owned()),
            node_name: Some(node.to_owned()),
        })
    }

    #[test]
    fn lanes_present_the_same_certificate_as_their_link() {
        let (a, b) = (certificate("a"), certificate("b"));
        let by_certificate = AgentIdentity::of_certificate(Some(a.clone()));
        let by_token = AgentIdentity::of_account(account("1"), None);
        let by_both = AgentIdentity::of_account(account("1"), Some(a.clone()));
        for (identity, own, other, none) in [
            (&by_certificate, true, false, false),
            (&by_both, true, false, false),
            (&by_token, false, false, true),
            (&AgentIdentity::Unverified, false, false, false),
        ] {
            assert_eq!(identity.may_bind(Some(&a.holder)), own, "{identity:?}");
            assert_eq!(identity.may_bind(Some(&b.holder)), other, "{identity:?}");
            assert_eq!(identity.may_bind(None), none, "{identity:?}");
        }
    }

    #[test]
    fn one_account_on_two_nodes_is_two_owners() {
        let owner = |identity: &AgentIdentity| identity.owner().cloned();
        let on = |node| AgentIdentity::of_account(account(node), None);
        assert_ne!(owner(&on("1")), owner(&on("2")));
        let with_certificate = AgentIdentity::of_account(account("1"), Some(certificate("a")));
        assert_eq!(owner(&on("1")), owner(&with_certificate));
        assert_eq!(with_certificate.holders().len(), 2);
        assert_eq!(owner(&AgentIdentity::Unverified), None);
    }
}
