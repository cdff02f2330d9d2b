//! The peers of a command line: where they are, and whether this server could link to them. Asks none for keys, dials nothing.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use adit_agent::connector::{ConnectorError, ForwardProxies};
use adit_agent::link::{ConnectError, Identity, open};
use adit_core::ids::AgentId;
use adit_core::peer::PEERS_MAX;
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::{AgentHello, Extensions, PeerHello, PeerVersion};
use adit_peer::Fixed;
use futures_util::future::join_all;
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::line::{degraded, missing, ok};
use super::servers::{self, connector};
use crate::peers::asker_tls;
use crate::status::model::Capability;
use adit_config::address::ServerAddress;
use adit_config::limits;
use adit_config::plan::{PeerAddress, PeersPlan, ServerPlan};
use adit_host::blocking::start_runtime;
use adit_net::resolve::{Resolve, SystemResolver};
use adit_tls::reload::ReloadableClientTls;

const NAME: &str = "peer";

/// Lines about the peers of a server. `connect`: a link to each is tried.
///
/// # Errors
/// The runtime or the resolver could not be created.
pub(super) fn of_server(plan: &ServerPlan, connect: bool) -> anyhow::Result<Vec<Capability>> {
    let Some(peers) = &plan.peers else {
        return Ok(Vec::new());
    };
    let runtime = start_runtime(&mut Builder::new_current_thread(), 0, |_error| ())?;
    let lines = runtime.block_on(async {
        let (mut lines, targets) = places(peers, &SystemResolver::new()?).await;
        if connect {
            match asker_tls(peers, &plan.tls) {
                Ok(tls) => {
                    let attempts = targets.iter().take(PEERS_MAX);
                    let attempts = attempts.map(|(name, at)| attempt(plan, peers, &tls, name, *at));
                    lines.extend(join_all(attempts).await);
                }
                // The files have a line of their own.
                Err(_broken) => lines.push(missing(
                    "not tried: the certificates above cannot be used",
                    "correct the certificates of the lines above",
                )),
            }
        }
        anyhow::Ok(lines)
    })?;
    Ok(lines.into_iter().map(|line| line.named(NAME)).collect())
}

/// Lines about names, and all addresses that this server would call, each with the name in the certificate there.
async fn places(
    peers: &PeersPlan,
    resolver: &dyn Resolve,
) -> (Vec<Capability>, Vec<(String, SocketAddr)>) {
    let (mut lines, mut targets) = (Vec::new(), Vec::new());
    for peer in &peers.peers {
        let (name, port) = match peer {
            PeerAddress::Literal(address) => {
                targets.push((address.ip().to_string(), *address));
                continue;
            }
            PeerAddress::Dns { name, port } => (name, *port),
        };
        let found = match timeout(limits::LINK_CONNECT_TIMEOUT, resolver.lookup_ip(name)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                lines.push(missing(
                    format!("{peer}: lookup {name}: {error}"),
                    "check the name; a headless Service names servers that are not ready only with publishNotReadyAddresses",
                ));
                continue;
            }
            Err(_elapsed) => {
                lines.push(missing(
                    format!("{peer}: lookup {name}: no answer"),
                    "check this host's name servers",
                ));
                continue;
            }
        };
        let found = found.iter().map(IpAddr::to_canonical);
        let (inside, outside): (Vec<IpAddr>, Vec<IpAddr>) =
            found.partition(|ip| adit_peer::is_inside(&peers.networks, *ip));
        if !outside.is_empty() {
            lines.push(degraded(
                format!(
                    "{peer}: {} outside of --peer-network, which this server does not call",
                    listed(&outside)
                ),
                "correct the name, or add the network of the servers to --peer-network",
            ));
        }
        if !inside.is_empty() {
            lines.push(ok(format!("{peer} has {}", listed(&inside))));
        } else if outside.is_empty() {
            lines.push(missing(
                format!("{peer}: {name} has no address"),
                "check the selector of the Service, and publishNotReadyAddresses",
            ));
        }
        let inside = inside
            .into_iter()
            .map(|ip| (name.clone(), SocketAddr::new(ip, port)));
        targets.extend(inside);
    }
    (lines, targets)
}

/// Addresses, the first of them by themselves.
fn listed(addresses: &[IpAddr]) -> String {
    const SHOWN: usize = 8;
    let shown = addresses.iter().take(SHOWN).map(ToString::to_string);
    let shown = shown.collect::<Vec<_>>().join(", ");
    match addresses.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Why no link to a peer could be opened, by the hop that failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Server(#[from] servers::Failure),
    #[error(transparent)]
    Call(#[from] ConnectError),
    /// The other end is no peer.
    #[error("the server there does not answer as a peer")]
    NoPeer,
}

/// Opens a link to the server at an address as this server would, and drops it at once.
async fn attempt(
    plan: &ServerPlan,
    peers: &PeersPlan,
    tls: &Arc<ReloadableClientTls>,
    name: &str,
    address: SocketAddr,
) -> Capability {
    let id = plan.server_id.as_str();
    let connector = connector(
        Arc::new(Fixed(address.ip())),
        Arc::clone(tls),
        ForwardProxies::none(),
    );
    let called = ServerAddress::Host {
        host: name.to_owned(),
        port: address.port(),
    };
    let identity = Identity {
        hello: AgentHello {
            agent: AgentId::new(id),
            identifiers: Identifiers::default(),
            extensions: Extensions {
                link: true,
                lanes: false,
            },
            version: PeerVersion::own(),
            peer: Some(PeerHello {
                group: peers.group.clone(),
                incarnation: rand::random(),
                agent_links: None,
            }),
            zone: None,
        },
        token: None,
    };
    let opening = async {
        servers::accepted(&connector, &called).await?;
        let connected = connector
            .connect(&called)
            .await
            .map_err(servers::Failure::from)?;
        let keepalive = plan.agents.keepalive;
        let opened = open(
            connected.stream,
            &connected.authority,
            &identity,
            keepalive,
            None,
        )
        .await;
        let server = opened?.server;
        server
            .peer
            .map_or(Err(Failure::NoPeer), |_is_peer| Ok(server.server))
    };
    match opening.await {
        Ok(server) if server.as_str() == id => ok(format!(
            "{address} is this server, or one with its --server-id"
        )),
        Ok(server) => ok(format!(
            "{address} is the server {server}, and takes this one for a peer"
        )),
        Err(failure) => missing(format!("{address}: {failure}"), remedy(&failure)),
    }
}

fn remedy(failure: &Failure) -> &'static str {
    match failure {
        Failure::Server(servers::Failure::Connect(ConnectorError::Tls(_))) => {
            "check that the port is that of --peer-bind there, and --peer-cert and --peer-ca-cert of both servers"
        }
        Failure::Server(servers::Failure::Connect(_)) => {
            "start the server there; its --peer-bind must have this port, and policies and packet filters must admit it from \
             all servers"
        }
        Failure::Server(servers::Failure::Refused(_) | servers::Failure::Closed) => {
            "give a --peer-cert that a CA in the server's --peer-ca-cert has signed, valid for clients, and not revoked there"
        }
        Failure::Call(ConnectError::Refused { .. }) => {
            "give all servers of the installation one --peer-group, and in --peer the ports of --peer-bind"
        }
        Failure::Server(servers::Failure::Elapsed(_)) | Failure::Call(_) => {
            "look at the load and the log of that server, and at what is between the two"
        }
        Failure::NoPeer => "give the address of its --peer-bind",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use adit_config::plan::TlsFiles;
    use adit_net::resolve::{Answer, ResolveError, SrvRecord};

    use super::*;
    use crate::status::model::Verdict;

    struct Book(HashMap<&'static str, Vec<IpAddr>>);

    impl Resolve for Book {
        fn lookup_ip<'a>(&'a self, name: &'a str) -> Answer<'a, Vec<IpAddr>> {
            let found = self.0.get(name).cloned().ok_or(ResolveError::NotFound);
            Box::pin(std::future::ready(found))
        }

        fn lookup_srv<'a>(&'a self, _name: &'a str) -> Answer<'a, Vec<SrvRecord>> {
            Box::pin(std::future::ready(Err(ResolveError::NotFound)))
        }
    }

    #[tokio::test]
    async fn addresses_of_names_are_called_inside_the_networks_only() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let book = Book(HashMap::from([
            (
                "both",
                vec![address("::ffff:10.0.0.1"), address("192.0.2.1")],
            ),
            ("outside", vec![address("192.0.2.2")]),
            ("empty", Vec::new()),
        ]));
        let peers = [
            "10.0.0.9:1",
            "dns:both:2",
            "dns:outside:3",
            "dns:empty:4",
            "dns:no:5",
        ];
        let peers = PeersPlan {
            bind: None,
            tls: TlsFiles {
                cert: "/c".into(),
                key: "/k".into(),
                client_ca: None,
            },
            crl: None,
            peers: peers.map(|text| PeerAddress::parse(text).unwrap()).into(),
            networks: vec!["10.0.0.0/8".parse().unwrap()],
            group: "g".to_owned(),
            agent_links: limits::PEER_AGENT_LINKS,
        };
        let (lines, targets) = places(&peers, &book).await;
        let lines: Vec<(Verdict, &str)> = lines
            .iter()
            .map(|line| (line.verdict, line.text.as_str()))
            .collect();
        let outside = "outside of --peer-network, which this server does not call";
        assert_eq!(
            lines,
            [
                (
                    Verdict::Degraded,
                    &*format!("dns:both:2: 192.0.2.1 {outside}")
                ),
                (Verdict::Ok, "dns:both:2 has 10.0.0.1"),
                (
                    Verdict::Degraded,
                    &*format!("dns:outside:3: 192.0.2.2 {outside}")
                ),
                (Verdict::Missing, "dns:empty:4: empty has no address"),
                (Verdict::Missing, "dns:no:5: lookup no: no such host"),
            ]
        );
        let called = [("10.0.0.9", "10.0.0.9:1"), ("both", "10.0.0.1:2")];
        let called = called.map(|(name, at)| (name.to_owned(), at.parse().unwrap()));
        assert_eq!(targets, called);
    }
}
