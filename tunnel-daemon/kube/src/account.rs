//! The service account behind a token.

use std::collections::BTreeMap;
use std::fmt;

/// Keys of `status.user.extra` (Kubernetes 1.32 has them all, 1.20 the pod's).
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// A service account, and the pod and node that its token is bound to, as the API server reports them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Unique id of the pod, if the token is bound to one.
    pub pod_uid: Option<String>,
    /// Name of the pod's node, or of the node that the token is bound to.
    pub node_name: Option<String>,
}

/// Why a user name is not that of a service account. Upstream's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotAnAccount {
    /// The name does not have four parts between colons.
    #[error("unexpected username format")]
    Format,
    /// The first two parts are not `system:serviceaccount`.
    #[error("username returned is not a service account")]
    OtherUser,
}

/// Namespace and name in a user name, `system:serviceaccount:NAMESPACE:NAME`.
///
/// # Errors
/// The user is not a service account.
pub fn parse_username(username: &str) -> Result<(&str, &str), NotAnAccount> {
    let parts: Vec<&str> = username.split(':').collect();
    let [system, kind, namespace, name] = parts[..] else {
        return Err(NotAnAccount::Format);
    };
    if (system, kind) != ("system", "serviceaccount") {
        return Err(NotAnAccount::OtherUser);
    }
    Ok((namespace, name))
}

impl ServiceAccount {
    /// An account from a split user name, with what the API server reports about the token.
    pub(crate) fn new(
        namespace: &str,
        name: &str,
        extra: Option<&BTreeMap<String, Vec<String>>>,
    ) -> Self {
        let first = |key: &str| {
            let values = extra?.get(key)?;
            values.first().filter(|value| !value.is_empty()).cloned()
        };
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            pod_uid: first(POD_UID),
            node_name: first(NODE_NAME),
        }
    }

    /// The owner of what an agent with this token claims: the node, which outlives its pods; else the pod; else the
    /// account.
    #[must_use]
    pub fn owner(&self) -> String {
        let Self {
            namespace,
            name,
            pod_uid,
            node_name,
            ..
        } = self;
        match (node_name, pod_uid) {
            (Some(node), _) => format!("serviceaccount={namespace}/{name} node={node}"),
            (None, Some(pod)) => format!("serviceaccount={namespace}/{name} pod={pod}"),
            (None, None) => format!("serviceaccount={namespace}/{name}"),
        }
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.owner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_account_usernames_have_four_parts() {
        assert_eq!(
            parse_username("system:serviceaccount:kube-system:agent"),
            Ok(("kube-system", "agent"))
        );
        for (name, why) in [
            ("admin", NotAnAccount::Format),
            ("system:node:a", NotAnAccount::Format),
            ("system:serviceaccount:a:b:c", NotAnAccount::Format),
            ("system:node:a:b", NotAnAccount::OtherUser),
            ("other:serviceaccount:a:b", NotAnAccount::OtherUser),
        ] {
            assert_eq!(parse_username(name), Err(why), "{name}");
        }
    }

    #[test]
    fn the_owner_is_the_node_else_the_pod_else_the_service_account() {
        let extra = |entries: &[(&str, &str)]| -> BTreeMap<String, Vec<String>> {
            let entry =
                |(key, value): &(&str, &str)| ((*key).to_owned(), vec![(*value).to_owned()]);
            entries.iter().map(entry).collect()
        };
        let owner =
            |entries: &[(&str, &str)]| ServiceAccount::new("n", "s", Some(&extra(entries))).owner();
        let (old, new) = (
            [(POD_UID, "1"), (NODE_NAME, "a")],
            [(POD_UID, "2"), (NODE_NAME, "a")],
        );
        assert_eq!(owner(&old), owner(&new), "a replaced pod");
        assert_ne!(owner(&old), owner(&[(POD_UID, "1"), (NODE_NAME, "b")]));
        assert_ne!(owner(&[(POD_UID, "1")]), owner(&[(POD_UID, "2")]));
        assert_eq!(owner(&[(NODE_NAME, "")]), "serviceaccount=n/s");
        assert_eq!(
            ServiceAccount::new("n", "s", None).owner(),
            "serviceaccount=n/s"
        );
    }
}
