//! Decides by the review of a token, and words the refusals that reach the agent.

use std::time::SystemTime;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};

use crate::account::{NotAnAccount, ServiceAccount, parse_username};
use crate::request::{RequestError, excerpt};
use crate::token::{Claims, Token};

/// Path of token reviews.
pub(crate) const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// Which tokens are let in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReviewPolicy {
    /// Namespace of the service account.
    pub namespace: String,
    /// Name of the service account.
    pub service_account: String,
    /// Audience that tokens must have.
    pub audience: String,
}

/// Why a token is not let in. The words, but for those of the overload, are upstream's (v0.36).
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReviewError {
    /// The API server could not be asked.
    #[error("Failed to authenticate request. err:{0}")]
    Request(#[from] RequestError),
    /// The API server's own reason.
    #[error("lookup failed: {0}")]
    Status(String),
    /// The token is not valid.
    #[error("lookup failed: service account jwt not valid")]
    NotValid,
    /// The token's user is not a service account.
    #[error("lookup failed: {0}")]
    NotAnAccount(#[from] NotAnAccount),
    /// The token's account is in another namespace.
    #[error("lookup failed: incoming request from {found:?} namespace. Expected {expected:?}")]
    Namespace {
        /// Namespace of the token.
        found: String,
        /// As configured.
        expected: String,
    },
    /// The token belongs to another account.
    #[error(
        "lookup failed: incoming request from {found:?} service account. Expected {expected:?}"
    )]
    ServiceAccount {
        /// Of the token.
        found: String,
        /// As configured.
        expected: String,
    },
    /// Too many agents wait.
    #[error("too many agents wait to be authenticated; try again")]
    Overload,
    /// No turn came in time.
    #[error("Failed to authenticate request. err:no turn within {} s", crate::reviewer::LIMIT.as_secs())]
    NoSlot,
}

impl ReviewError {
    /// The words for the caller, who has proved nothing: not those of the API server or of this host's files, which name users,
    /// addresses and paths.
    #[must_use]
    pub fn told(&self) -> String {
        match self {
            Self::Request(_) => Self::generic("Failed to authenticate request. err:"),
            Self::Status(_) => Self::generic("lookup failed: "),
            own => own.to_string(),
        }
    }

    fn generic(shape: &str) -> String {
        format!("{shape}the Kubernetes API did not accept the review; the server's log says why")
    }

    /// Whether the token itself is the reason.
    #[must_use]
    pub fn is_denial(&self) -> bool {
        !matches!(self, Self::Request(_) | Self::Overload | Self::NoSlot)
    }
}

impl ReviewPolicy {
    /// Checks what a token claims, before it costs a review. Passing proves nothing.
    ///
    /// # Errors
    /// Upstream would refuse the token, too.
    pub fn check_claims(&self, token: &Token, now: SystemTime) -> Result<Claims, ReviewError> {
        let claims = token.claims().ok_or(ReviewError::NotValid)?;
        let is_for_others = claims
            .audiences
            .as_ref()
            .is_some_and(|audiences| !audiences.contains(&self.audience));
        if claims.is_expired(now) || is_for_others {
            return Err(ReviewError::NotValid);
        }
        if let Some(subject) = &claims.subject {
            self.check_username(subject)?;
        }
        Ok(claims)
    }

    /// # Errors
    /// The user is not the configured account.
    fn check_username<'a>(&self, username: &'a str) -> Result<(&'a str, &'a str), ReviewError> {
        let (namespace, name) = parse_username(username)?;
        if namespace != self.namespace {
            return Err(ReviewError::Namespace {
                found: excerpt(namespace),
                expected: self.namespace.clone(),
            });
        }
        if name != self.service_account {
            return Err(ReviewError::ServiceAccount {
                found: excerpt(name),
                expected: self.service_account.clone(),
            });
        }
        Ok((namespace, name))
    }

    /// The request for a review.
    pub(crate) fn request(&self, token: &Token) -> TokenReview {
        TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.reveal().to_owned()),
                audiences: Some(vec![self.audience.clone()]),
            },
            ..TokenReview::default()
        }
    }

    /// Decides by the answer, in upstream's order.
    ///
    /// # Errors
    /// The token is not let in.
    pub(crate) fn decide(&self, status: TokenReviewStatus) -> Result<ServiceAccount, ReviewError> {
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            return Err(ReviewError::Status(excerpt(&error)));
        }
        if status.authenticated != Some(true) {
            return Err(ReviewError::NotValid);
        }
        let user = status.user.unwrap_or_default();
        let username = user.username.unwrap_or_default();
        let (namespace, name) = self.check_username(&username)?;
        // An authenticator that knows no audiences omits the field; one that lists other audiences has not checked ours.
        let is_for_others = status
            .audiences
            .is_some_and(|audiences| !audiences.contains(&self.audience));
        if is_for_others {
            return Err(ReviewError::NotValid);
        }
        Ok(ServiceAccount::new(namespace, name, user.extra.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    fn policy() -> ReviewPolicy {
        ReviewPolicy {
            namespace: "kube-system".to_owned(),
            service_account: "konnectivity-agent".to_owned(),
            audience: "system:konnectivity-server".to_owned(),
        }
    }

    fn status(username: &str) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec!["system:konnectivity-server".to_owned()]),
            user: Some(UserInfo {
                username: Some(username.to_owned()),
                ..UserInfo::default()
            }),
            error: None,
        }
    }

    const AGENT: &str = "system:serviceaccount:kube-system:konnectivity-agent";

    #[test]
    fn callers_are_not_told_what_the_api_server_says() {
        let status = TokenReviewStatus {
            error: Some("secret of 10.0.0.1".to_owned()),
            ..TokenReviewStatus::default()
        };
        let status = policy().decide(status).unwrap_err();
        let request = ReviewError::from(RequestError::Transport("secret of 10.0.0.1".to_owned()));
        for (error, shape) in [
            (status, "lookup failed: "),
            (request, "Failed to authenticate request. err:"),
        ] {
            assert!(error.to_string().contains("secret"), "for the log");
            let told = error.told();
            assert!(told.starts_with(shape), "{told}");
            assert!(!told.contains("secret"), "{told}");
        }
        let own = ReviewError::NotValid;
        assert_eq!(own.told(), own.to_string());
    }

    #[test]
    fn a_review_is_checked_in_upstreams_order_and_wording() {
        let account = policy().decide(status(AGENT)).unwrap();
        assert_eq!(account.name, "konnectivity-agent");
        let with = |change: &dyn Fn(&mut TokenReviewStatus)| {
            let mut status = status(AGENT);
            change(&mut status);
            let decided = policy().decide(status).map(|_account| ());
            decided.map_err(|error| error.to_string())
        };
        let named = |name: &str| policy().decide(status(name)).unwrap_err().to_string();
        let not_valid = Err("lookup failed: service account jwt not valid".to_owned());
        let refused = (Some("no".to_owned()), Some(false));
        let refused = with(&|status| (status.error, status.authenticated) = refused.clone());
        assert_eq!(refused, Err("lookup failed: no".to_owned()));
        for authenticated in [Some(false), None] {
            assert_eq!(
                with(&|status| status.authenticated = authenticated),
                not_valid
            );
        }
        assert_eq!(with(&|status| status.error = Some(String::new())), Ok(()));
        for audiences in [vec!["other".to_owned()], Vec::new()] {
            let audiences = Some(audiences);
            assert_eq!(
                with(&|status| status.audiences = audiences.clone()),
                not_valid
            );
        }
        assert_eq!(with(&|status| status.audiences = None), Ok(()));
        let unexpected = Err("lookup failed: unexpected username format".to_owned());
        assert_eq!(with(&|status| status.user = None), unexpected);
        let no_account = "lookup failed: username returned is not a service account";
        assert_eq!(named("system:node:a:b"), no_account);
        let incoming = "lookup failed: incoming request from \"default\"";
        assert_eq!(
            named("system:serviceaccount:default:konnectivity-agent"),
            format!("{incoming} namespace. Expected \"kube-system\"")
        );
        assert_eq!(
            named("system:serviceaccount:kube-system:default"),
            format!("{incoming} service account. Expected \"konnectivity-agent\"")
        );
    }
}
