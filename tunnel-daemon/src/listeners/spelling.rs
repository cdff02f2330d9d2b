//! Listeners as flags spell them, for the log line that reports the start.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;

use adit_config::plan::{AgentPlan, FrontendListen, FrontendPlan, ServerPlan};

/// A flag's value that turns its listener off.
const OFF: &str = "off";

/// Listeners of a server, except its port for agents.
pub(crate) struct ServerListeners {
    /// Values of `--frontend`; a TCP frontend shows the port that the kernel chose.
    pub(crate) frontends: String,
    /// `None` without a transparent listener.
    pub(crate) transparent: Option<String>,
    pub(crate) health: String,
    pub(crate) admin: String,
    pub(crate) admin_socket: String,
}

/// Listeners of an agent.
pub(crate) struct AgentListeners {
    /// Values of `--target`; `None` without such a listener.
    pub(crate) targets: Option<String>,
    pub(crate) health: String,
    pub(crate) admin: String,
    pub(crate) admin_socket: String,
}

impl ServerListeners {
    /// `frontends`: the address of each frontend that uses TCP, in the order of the plan.
    pub(crate) fn of(
        plan: &ServerPlan,
        frontends: &[Option<SocketAddr>],
        transparent: Option<SocketAddr>,
        [health, admin]: [Option<SocketAddr>; 2],
        admin_socket: Option<&Path>,
    ) -> Self {
        let each = plan.frontends.iter().zip(frontends);
        Self {
            frontends: list(each.map(|(plan, address)| frontend(plan, *address))),
            transparent: transparent.map(|address| address.to_string()),
            health: or_off(health),
            admin: or_off(admin),
            admin_socket: or_off(admin_socket.map(Path::display)),
        }
    }
}

impl AgentListeners {
    /// `targets`: the addresses of the listeners, in the order of the plan.
    pub(crate) fn of(
        plan: &AgentPlan,
        targets: &[SocketAddr],
        [health, admin]: [Option<SocketAddr>; 2],
        admin_socket: Option<&Path>,
    ) -> Self {
        let each = targets.iter().zip(&plan.target_listeners);
        let each =
            each.map(|(address, target)| format!("{}:{}", address.port(), target.destination));
        Self {
            targets: Some(list(each)).filter(|targets| !targets.is_empty()),
            health: or_off(health),
            admin: or_off(admin),
            admin_socket: or_off(admin_socket.map(Path::display)),
        }
    }
}

fn frontend(plan: &FrontendPlan, address: Option<SocketAddr>) -> String {
    let dialect = plan.dialect.name();
    match (&plan.listen, address) {
        (FrontendListen::Unix { path, .. }, _) => format!("{dialect}=unix:{}", path.display()),
        (FrontendListen::Tcp { .. }, Some(address)) => format!("{dialect}=tcp:{address}"),
        (FrontendListen::Tcp { bind, .. }, None) => format!("{dialect}=tcp:{bind}"),
    }
}

fn or_off(listener: Option<impl Display>) -> String {
    listener.map_or_else(|| OFF.to_owned(), |listener| listener.to_string())
}

/// Joins the values of a repeatable flag by commas.
pub(crate) fn list(values: impl IntoIterator<Item = impl Display>) -> String {
    let values: Vec<String> = values.into_iter().map(|value| value.to_string()).collect();
    values.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_config::address::BindAddress;
    use adit_config::plan::Dialect;

    #[test]
    fn frontends_are_spelled_as_their_flags() {
        let unix = FrontendPlan {
            dialect: Dialect::Grpc,
            listen: FrontendListen::Unix {
                path: "/run/adit/kas.sock".into(),
                delete_existing: false,
            },
        };
        assert_eq!(frontend(&unix, None), "grpc=unix:/run/adit/kas.sock");
        let tcp = FrontendPlan {
            dialect: Dialect::HttpConnect,
            listen: FrontendListen::Tcp {
                bind: BindAddress::parse("127.0.0.1:0").unwrap(),
                tls: None,
            },
        };
        let bound = Some(SocketAddr::from(([127, 0, 0, 1], 8131)));
        assert_eq!(frontend(&tcp, bound), "http-connect=tcp:127.0.0.1:8131");
        assert_eq!(or_off(None::<SocketAddr>), "off");
        assert_eq!(list(["a", "b"]), "a,b");
    }
}
