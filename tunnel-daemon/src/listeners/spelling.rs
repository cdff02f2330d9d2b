//! Listeners as flags spell them, for the log line that reports the start.

use std::fmt::Display;
use std::net::SocketAddr;

use adit_config::plan::{AgentPlan, FrontendListen, FrontendPlan};

/// A flag's value that turns its listener off.
const OFF: &str = "off";

/// Values of `--frontend`; `tcp` has the addresses of the frontends that use TCP, in the order of the plan.
pub(crate) fn frontends(plans: &[FrontendPlan], tcp: &[SocketAddr]) -> String {
    let mut tcp = tcp.iter().copied();
    list(plans.iter().map(|plan| match plan.listen {
        FrontendListen::Unix { .. } => frontend(plan, None),
        FrontendListen::Tcp { .. } => frontend(plan, tcp.next()),
    }))
}

/// Values of `--target`; `None` without such a listener.
pub(crate) fn targets(plan: &AgentPlan, addresses: &[SocketAddr]) -> Option<String> {
    let each = addresses.iter().zip(&plan.target_listeners);
    let each = each.map(|(address, target)| format!("{}:{}", address.port(), target.destination));
    Some(list(each)).filter(|targets| !targets.is_empty())
}

fn frontend(plan: &FrontendPlan, address: Option<SocketAddr>) -> String {
    let dialect = plan.dialect.name();
    match (&plan.listen, address) {
        (FrontendListen::Unix { path, .. }, _) => format!("{dialect}=unix:{}", path.display()),
        (FrontendListen::Tcp { .. }, Some(address)) => format!("{dialect}=tcp:{address}"),
        (FrontendListen::Tcp { bind, .. }, None) => format!("{dialect}=tcp:{bind}"),
    }
}

/// The address of a listener, or that it is off.
pub(crate) fn or_off(listener: Option<impl Display>) -> String {
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
