//! The default id of a server or an agent.

use uuid::Uuid;

/// The id from the environment, else a random one. An empty variable counts as unset, as upstream.
pub(crate) fn id(env: &dyn Fn(&str) -> Option<String>, name: &str) -> String {
    env(name)
        .filter(|id| !id.is_empty())
        .unwrap_or_else(|| Uuid::new_v4().to_string())
}
