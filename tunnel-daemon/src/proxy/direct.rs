//! Connections past the servers of a proxy: to APIs of clouds, and while the tunnel is out of order.
//!
//! What a client asks for may be a tenant's choice, so a direct connection reaches public addresses only, and none of this host's own
//! networks, unless a flag names more.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use adit_core::failure::DialFailure;
use adit_core::text::Excerpt;
use adit_proxy::connect::open_tunnel;
use bytes::Bytes;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tokio::net::TcpStream;

use adit_config::plan::{DirectPlan, HttpProxy};
use adit_host::interfaces::local_networks;
use adit_net::dial::{DialError, Network};
use adit_net::direct;
use adit_net::happy_eyeballs::Race;
use adit_net::resolve::{Resolve as _, SystemResolver};
use adit_net::self_sockets::OwnSockets;
use adit_net::socket;
use adit_tls::stream::{ByteStream, PeerAddr, Socket};

/// Ends of the names of clouds' APIs, as HyperShift's sidecars know them.
const CLOUD_APIS: [&str; 7] = [
    ".amazonaws.com",
    ".c2s.ic.gov",
    ".hci.ic.gov",
    ".sc2s.sgov.gov",
    ".microsoftonline.com",
    ".azure.com",
    ".cloud.ibm.com",
];
/// Time for a connection, over all addresses: that of HyperShift's sidecars.
const CONNECT_WITHIN: Duration = Duration::from_secs(120);
/// Time for the environment's proxy to answer for one address.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// How long the networks of interfaces are taken for known.
const NETWORKS_FOR: Duration = Duration::from_secs(5);
/// Addresses of a name that are tried.
const ADDRESSES_MAX: usize = 4;

/// Networks that no direct connection reaches, besides those that are no unicast: those of this cluster, and where clouds keep
/// metadata and their agents.
const GUARDED_V4: [([u8; 4], u8); 10] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([168, 63, 129, 16], 32),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
];
const GUARDED_V6: [([u16; 8], u8); 6] = [
    ([0, 0, 0, 0, 0, 0, 0, 0], 127),
    ([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48),
    ([0x2001, 0, 0, 0, 0, 0, 0, 0], 32),
    ([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),
    ([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    ([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10),
];

/// See the module.
pub(super) struct Direct {
    plan: DirectPlan,
    /// The environment's proxy, if there is one.
    proxy: Option<HttpProxy>,
    /// Hosts that are not a cloud's, whatever their names end with.
    others: Vec<String>,
    resolver: Arc<SystemResolver>,
    own_sockets: OwnSockets,
    /// Networks of this host's interfaces, and since when they are known.
    own_networks: Mutex<Option<(Instant, Arc<[IpNet]>)>>,
}

impl Direct {
    /// `others`: hosts that are never a cloud's.
    ///
    /// # Errors
    /// The environment's proxy cannot be used.
    pub(super) fn new(
        plan: &DirectPlan,
        others: Vec<String>,
        resolver: Arc<SystemResolver>,
        own_sockets: OwnSockets,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            plan: plan.clone(),
            proxy: plan.https_proxy().map_err(anyhow::Error::msg)?,
            others,
            resolver,
            own_sockets,
            own_networks: Mutex::default(),
        })
    }

    /// Whether `host` is the API of a cloud, and these are reached directly.
    pub(super) fn takes(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.plan.cloud_apis
            && CLOUD_APIS.iter().any(|end| host.ends_with(end))
            && !self.others.contains(&host)
    }

    /// Connects to the API of a cloud. Returns what it has sent already.
    ///
    /// # Errors
    /// Why there is no connection, in an agent's words.
    pub(super) async fn open_cloud(
        &self,
        host: &str,
        port: u16,
    ) -> Result<(ByteStream, Bytes), DialFailure> {
        let found = self.resolver.lookup_ip(host).await;
        let ips =
            found.map_err(|failure| DialFailure::Target(format!("lookup {host}: {failure}")))?;
        self.open(host, ips, port).await
    }

    /// The networks of this host's interfaces, a few seconds old at most: they change, and a host may have many routes.
    fn own_networks(&self) -> Arc<[IpNet]> {
        let mut known = self
            .own_networks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((since, networks)) = &*known
            && since.elapsed() < NETWORKS_FOR
        {
            return Arc::clone(networks);
        }
        let networks: Arc<[IpNet]> = local_networks().into();
        *known = Some((Instant::now(), Arc::clone(&networks)));
        networks
    }

    /// Connects to one of the addresses of `host`, as far as they are permitted. Returns what the target has sent already.
    ///
    /// # Errors
    /// As [`Self::open_cloud`].
    pub(super) async fn open(
        &self,
        host: &str,
        ips: Vec<IpAddr>,
        port: u16,
    ) -> Result<(ByteStream, Bytes), DialFailure> {
        let own_networks = self.own_networks();
        if own_networks.is_empty() {
            return Err(DialFailure::Target(
                "the networks of this host are not known: mount /proc".to_owned(),
            ));
        }
        let permitted = ips
            .into_iter()
            .filter(|ip| self.permits(*ip, &own_networks));
        let permitted: Vec<IpAddr> = permitted.take(ADDRESSES_MAX).collect();
        if permitted.is_empty() {
            return Err(DialFailure::Target(format!(
                "no connection past the tunnel leads into this cluster: destination {host}:{port} is not on the list of allowed \
                 destinations"
            )));
        }
        let opening = async {
            match &self.proxy {
                Some(proxy) => self.by_proxy(proxy, permitted, port).await,
                None => {
                    let tcp = self.first_of(permitted, port).await?;
                    Ok((stream(tcp)?, Bytes::new()))
                }
            }
        };
        let opened = tokio::time::timeout(CONNECT_WITHIN, opening).await;
        opened.unwrap_or(Err(DialFailure::TimedOut))
    }

    /// By the environment's proxy, which is told an address that was judged, and never a client's name.
    async fn by_proxy(
        &self,
        proxy: &HttpProxy,
        permitted: Vec<IpAddr>,
        port: u16,
    ) -> Result<(ByteStream, Bytes), DialFailure> {
        let failed = |error: &dyn std::fmt::Display| {
            let error = error.to_string();
            DialFailure::Target(format!("proxy of HTTPS_PROXY: {}", Excerpt(&error)))
        };
        let ips = match proxy.host.parse::<IpAddr>() {
            Ok(ip) => vec![ip],
            Err(_name) => {
                let found = self.resolver.lookup_ip(&proxy.host).await;
                found.map_err(|failure| failed(&failure))?
            }
        };
        let mut told = DialFailure::NoAgent;
        for ip in permitted {
            let tcp = self.first_of(ips.clone(), proxy.port).await?;
            let mut stream = stream(tcp)?;
            let target = SocketAddr::new(ip, port).to_string();
            let authorization = proxy.authorization();
            let opening = open_tunnel(&mut stream, &target, authorization.as_deref());
            match tokio::time::timeout(ANSWER_WITHIN, opening).await {
                Ok(Ok(early)) => return Ok((stream, early)),
                Ok(Err(error)) => told = failed(&error),
                Err(_elapsed) => told = failed(&"it gives no answer"),
            }
        }
        Err(told)
    }

    async fn first_of(&self, ips: Vec<IpAddr>, port: u16) -> Result<TcpStream, DialFailure> {
        let connect = |ip| async move {
            let address = SocketAddr::new(ip, port);
            direct::connect(&self.own_sockets, direct::socket_for(address)?, address).await
        };
        let mut told = DialFailure::NoAgent;
        let mut race = Race::new(ips, connect);
        while let Some((ip, connected)) = race.next().await {
            match connected {
                Ok(tcp) => return Ok(tcp),
                Err(cause) => {
                    let error = DialError::Connect {
                        network: Network::Tcp,
                        addr: SocketAddr::new(ip, port),
                        cause,
                    };
                    told = DialFailure::Target(error.to_string());
                }
            }
        }
        Err(told)
    }

    fn permits(&self, ip: IpAddr, own_networks: &[IpNet]) -> bool {
        let contains =
            |networks: &[IpNet], ip| networks.iter().any(|network| network.contains(&ip));
        let reaches = match ip {
            IpAddr::V4(_) => None,
            IpAddr::V6(ip) => embedded(ip).map(IpAddr::from),
        };
        contains(&self.plan.allowed, ip)
            || !(is_guarded(ip) || contains(own_networks, reaches.unwrap_or(ip)))
    }
}

fn stream(tcp: TcpStream) -> Result<ByteStream, DialFailure> {
    socket::tune_lane(&tcp);
    let peer = tcp
        .peer_addr()
        .map_err(|error| DialFailure::Target(error.to_string()))?;
    Ok(ByteStream::Plain(Socket::Tcp(tcp), PeerAddr::Tcp(peer)))
}

/// Whether an address is none of the public internet, by itself or by the IPv4 address in it.
fn is_guarded(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_guarded_v4(ip),
        IpAddr::V6(ip) => {
            let is_listed = GUARDED_V6.iter().any(|(address, bits)| {
                Ipv6Net::new((*address).into(), *bits).is_ok_and(|network| network.contains(&ip))
            });
            is_listed || ip.is_multicast() || embedded(ip).is_some_and(is_guarded_v4)
        }
    }
}

fn is_guarded_v4(ip: Ipv4Addr) -> bool {
    let is_listed = GUARDED_V4.iter().any(|(address, bits)| {
        Ipv4Net::new((*address).into(), *bits).is_ok_and(|network| network.contains(&ip))
    });
    is_listed || ip.is_multicast() || ip.octets().first() >= Some(&240)
}

/// The IPv4 address in a mapped, compatible, translated (RFC 6052) or 6to4 one.
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let last = |ip: Ipv6Addr| {
        let [.., a, b, c, d] = ip.octets();
        Ipv4Addr::new(a, b, c, d)
    };
    match ip.segments() {
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => Some(last(ip)),
        [0x64, 0xff9b, ..] => Some(last(ip)),
        [0x2002, high, low, ..] => Some(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use adit_config::plan::ForwardProxy;

    #[test]
    fn no_direct_connection_leads_into_this_cluster_or_to_metadata() {
        for guarded in [
            "127.0.0.1",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "::ffff:0:10.0.0.1",
            "::10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1:a9fe:a9:fe00::",
            "64:ff9b:1::a9fe:a9fe",
            "2001::1",
            "192.0.0.192",
            "2002:a9fe:a9fe::1",
        ] {
            assert!(is_guarded(guarded.parse().unwrap()), "{guarded}");
        }
        for public in [
            "8.8.8.8",
            "172.32.0.1",
            "168.63.129.17",
            "100.128.0.1",
            "2606:4700::1111",
            "64:ff9b::808:808",
        ] {
            assert!(!is_guarded(public.parse().unwrap()), "{public}");
        }
    }

    fn plan(https_proxy: Option<String>, allowed: &[&str]) -> DirectPlan {
        DirectPlan {
            cloud_apis: true,
            allowed: allowed.iter().map(|text| text.parse().unwrap()).collect(),
            proxy: ForwardProxy {
                https_proxy,
                ..ForwardProxy::default()
            },
        }
    }

    fn direct(plan: &DirectPlan) -> anyhow::Result<Direct> {
        let resolver = Arc::new(SystemResolver::new().unwrap());
        Direct::new(plan, Vec::new(), resolver, OwnSockets::off())
    }

    #[tokio::test]
    async fn a_connection_within_this_host_needs_permission() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        for (allowed, opens) in [(vec![], false), (vec!["127.0.0.0/8"], true)] {
            let direct = direct(&plan(None, &allowed)).unwrap();
            let opened = direct
                .open("own.example", vec![address.ip()], address.port())
                .await;
            assert_eq!(opened.is_ok(), opens, "{allowed:?}");
            assert_eq!(listener.accept().is_ok(), opens, "{allowed:?}");
        }
    }

    #[test]
    fn public_networks_of_own_interfaces_need_permission() {
        let own = ["203.0.113.7/24", "2001:db8:0:1::7/64"].map(|text| text.parse().unwrap());
        let unnamed = direct(&plan(None, &[])).unwrap();
        let named = direct(&plan(None, &["203.0.113.0/28"])).unwrap();
        for (ip, is_own, is_named) in [
            ("203.0.113.7", true, true),
            ("203.0.113.200", true, false),
            ("::ffff:203.0.113.200", true, false),
            ("64:ff9b::cb00:7107", true, false),
            ("2001:db8:0:1::8", true, false),
            ("2001:db8:0:2::8", false, false),
            ("203.0.114.1", false, false),
        ] {
            let ip = ip.parse().unwrap();
            assert_eq!(unnamed.permits(ip, &own), !is_own, "{ip}");
            assert_eq!(named.permits(ip, &own), !is_own || is_named, "{ip}");
        }
    }

    /// The environment's proxy is told the address that was judged; it stands where it may.
    #[tokio::test]
    async fn the_environments_proxy_is_asked_for_an_address() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!(
            "http://user:secret@127.0.0.1:{}",
            listener.local_addr().unwrap().port()
        );
        let direct = direct(&plan(Some(url), &[])).unwrap();
        let answers = async {
            let mut heads = Vec::new();
            for answer in ["200 OK\r\n\r\nearly", "407 No\r\nContent-Length: 0\r\n\r\n"] {
                let (mut tcp, _peer) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(tcp.read_u8().await.unwrap());
                }
                heads.push(String::from_utf8(head).unwrap());
                let answer = format!("HTTP/1.1 {answer}");
                tcp.write_all(answer.as_bytes()).await.unwrap();
            }
            heads
        };
        let asks = async {
            let ip = IpAddr::from([192, 0, 9, 1]);
            let first = direct.open("ec2.amazonaws.com", vec![ip], 443).await;
            let second = direct.open("ec2.amazonaws.com", vec![ip], 443).await;
            (first, second)
        };
        let (heads, (first, second)) = tokio::join!(answers, asks);
        for head in heads {
            assert!(head.starts_with("CONNECT 192.0.9.1:443 "), "{head}");
            assert!(head.contains("Basic dXNlcjpzZWNyZXQ="), "{head}");
        }
        assert!(first.is_ok());
        let refused = second.map(|_opened| ()).unwrap_err().to_string();
        assert!(
            refused.contains("407") && !refused.contains("secret"),
            "{refused}"
        );
        let private = direct
            .open("x.azure.com", vec!["10.0.0.1".parse().unwrap()], 443)
            .await;
        assert!(private.is_err());
    }

    #[test]
    fn an_environments_proxy_with_tls_is_refused_at_start() {
        let url = "https://user:secret@proxy.example:3128";
        let error = direct(&plan(Some(url.to_owned()), &[])).err().unwrap();
        let error = error.to_string();
        assert!(
            error.contains("HTTPS_PROXY") && !error.contains("secret"),
            "{error}"
        );
    }

    #[test]
    fn names_of_clouds_are_told_by_their_ends() {
        let resolver = Arc::new(SystemResolver::new().unwrap());
        let plan = DirectPlan {
            cloud_apis: true,
            ..DirectPlan::default()
        };
        let others = vec!["proxy.azure.com".to_owned()];
        let direct = Direct::new(
            &plan,
            others.clone(),
            Arc::clone(&resolver),
            OwnSockets::off(),
        )
        .unwrap();
        for (host, is_cloud) in [
            ("ec2.eu-west-1.amazonaws.com", true),
            ("LOGIN.MicrosoftOnline.com.", true),
            ("iam.cloud.ibm.com", true),
            ("amazonaws.com", false),
            ("amazonaws.com.evil.example", false),
            ("notamazonaws.com", false),
            ("proxy.azure.com", false),
        ] {
            assert_eq!(direct.takes(host), is_cloud, "{host}");
        }
        let plan = DirectPlan::default();
        let off = Direct::new(&plan, others, resolver, OwnSockets::off()).unwrap();
        assert!(!off.takes("ec2.eu-west-1.amazonaws.com"));
    }
}
