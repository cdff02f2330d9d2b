//! Tests of the system resolver against a small name server.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use futures_util::FutureExt as _;
use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA, SRV};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::super::dns::{ADDRESSES_MAX, ATTEMPT_MAX};
use super::*;

mod bounds;
mod changes;

/// Answers A, AAAA and SRV queries from a list. Unlisted names do not exist; names below `dead.` get no answer. Stops
/// when dropped.
struct NameServer {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
    _task: JoinSet<()>,
}

#[derive(Clone)]
enum Reply {
    Data(Vec<RData>),
    Code(ResponseCode),
    /// AAAA queries get no answer; A queries do.
    Silence,
}

impl NameServer {
    async fn start(zone: BTreeMap<&'static str, Reply>) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        Self::on(socket, zone, Duration::ZERO)
    }

    /// Answers after `delay`.
    fn on(socket: UdpSocket, zone: BTreeMap<&'static str, Reply>, delay: Duration) -> Self {
        let port = socket.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut buf = [0; 1500];
            loop {
                let (len, from) = socket.recv_from(&mut buf).await.unwrap();
                let question = Message::from_vec(&buf[..len]).unwrap();
                let query = question.queries[0].clone();
                let (name, kind) = (query.name().to_ascii().to_lowercase(), query.query_type());
                log.lock().unwrap().push(format!("{kind} {name}"));
                if name.ends_with(".dead.") {
                    continue;
                }
                let mut answer = Message::response(question.metadata.id, OpCode::Query);
                answer.add_query(query.clone());
                match zone.get(name.as_str()) {
                    Some(Reply::Data(data)) => {
                        for data in data.iter().filter(|data| data.record_type() == kind) {
                            let (name, data) = (query.name().clone(), data.clone());
                            answer.add_answer(Record::from_rdata(name, 60, data));
                        }
                    }
                    Some(Reply::Code(code)) => answer.metadata.response_code = *code,
                    Some(Reply::Silence) if kind == RecordType::AAAA => continue,
                    Some(Reply::Silence) => {
                        let data = RData::A(A::new(10, 0, 0, 9));
                        answer.add_answer(Record::from_rdata(query.name().clone(), 60, data));
                    }
                    None => answer.metadata.response_code = ResponseCode::NXDomain,
                }
                if !delay.is_zero() {
                    tokio::time::sleep(delay).await;
                }
                let answer = answer.to_vec().unwrap();
                socket.send_to(&answer, from).await.unwrap();
            }
        });
        Self {
            port,
            asked,
            _task: task,
        }
    }

    fn asked(&self) -> HashSet<String> {
        self.asked.lock().unwrap().drain(..).collect()
    }

    /// Waits until that many names below `dead.` were queried.
    async fn asked_for_dead(&self, names: usize) {
        let asked_for = || {
            let asked = self.asked.lock().unwrap();
            let names = asked.iter().filter_map(|line| line.strip_prefix("A "));
            let dead: HashSet<_> = names.filter(|name| name.ends_with(".dead.")).collect();
            dead.len()
        };
        let all = async {
            while asked_for() < names {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(10), all).await.unwrap();
    }
}

fn v4(last: u8) -> RData {
    RData::A(A::new(10, 0, 0, last))
}

fn files(dir: &Path, server: &NameServer) -> Files {
    Files {
        resolv_conf: dir.join("resolv.conf"),
        hosts: dir.join("hosts"),
        dns_port: server.port,
        own_sockets: OwnSockets::off(),
    }
}

fn resolver(dir: &Path, server: &NameServer, resolv_conf: &str, hosts: &str) -> SystemResolver {
    let files = files(dir, server);
    fs::write(&files.resolv_conf, resolv_conf).unwrap();
    fs::write(&files.hosts, hosts).unwrap();
    SystemResolver::from_files(files, Reread::default()).unwrap()
}

/// A name server with this zone, and a resolver with this configuration, whose files are in the folder.
async fn start(
    zone: BTreeMap<&'static str, Reply>,
    conf: &str,
) -> (NameServer, TempDir, SystemResolver) {
    let (server, dir) = (NameServer::start(zone).await, TempDir::new().unwrap());
    let resolver = resolver(dir.path(), &server, conf, "");
    (server, dir, resolver)
}

fn ips(list: &str) -> Vec<IpAddr> {
    list.split_whitespace()
        .map(|ip| ip.parse().unwrap())
        .collect()
}

/// Looks up each of these names; the lookups end when the set is dropped.
fn look_up(
    resolver: &Arc<SystemResolver>,
    names: impl Iterator<Item = String>,
) -> JoinSet<Result<Vec<IpAddr>, ResolveError>> {
    let mut lookups = JoinSet::new();
    for name in names {
        let resolver = Arc::clone(resolver);
        lookups.spawn(async move { resolver.lookup_ip(&name).await });
    }
    lookups
}

const CONF: &str = "nameserver 127.0.0.1\nsearch ns.svc.test svc.test\noptions ndots:5\n";

#[tokio::test]
async fn search_domains_are_walked_in_order_and_both_families_come_from_one_domain() {
    let v6 = RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
    let zone = BTreeMap::from([
        ("web.svc.test.", Reply::Data(vec![v4(1), v6])),
        ("web.", Reply::Data(vec![v4(2)])),
        ("outside.example.", Reply::Data(vec![v4(3)])),
    ]);
    let (server, _dir, resolver) = start(zone, CONF).await;
    assert_eq!(resolver.lookup_ip("WEB").await, Ok(ips("fd00::1 10.0.0.1")));
    let asked = server.asked();
    assert!(asked.contains("A web.ns.svc.test."), "{asked:?}");
    assert!(!asked.contains("A web."), "{asked:?}");
    assert_eq!(resolver.lookup_ip("web.").await, Ok(ips("10.0.0.2")));
    let outside = resolver.lookup_ip("outside.example").await;
    assert_eq!(outside, Ok(ips("10.0.0.3")), "ndots 5: asked last");
}

#[tokio::test]
async fn missing_names_and_failing_servers_are_distinguished() {
    let zone = BTreeMap::from([
        ("nodata.", Reply::Data(vec![])),
        ("broken.svc.test.", Reply::Code(ResponseCode::ServFail)),
    ]);
    let (_server, _dir, resolver) = start(zone, CONF).await;
    for name in ["gone", "gone.", "nodata.", "fe80::1%eth0", "a b", ""] {
        let found = resolver.lookup_ip(name).await;
        assert_eq!(found, Err(ResolveError::NotFound), "{name:?}");
    }
    let broken = resolver.lookup_ip("broken").await;
    assert_eq!(broken, Err(ResolveError::Misbehaving));
}

/// Sockets at 127.0.0.1 and 127.0.0.2 with the same port.
async fn two_places() -> (UdpSocket, UdpSocket) {
    let first = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let port = first.local_addr().unwrap().port();
    let second = UdpSocket::bind(("127.0.0.2", port)).await.unwrap();
    (first, second)
}

const TWO: &str = "nameserver 127.0.0.1\nnameserver 127.0.0.2\noptions timeout:0\n";

/// Only the first name server knows the name, and the second one answers faster.
#[tokio::test]
async fn name_servers_are_asked_in_their_order() {
    let (first, second) = two_places().await;
    let known = BTreeMap::from([("web.", Reply::Data(vec![v4(1)]))]);
    let first = NameServer::on(first, known, Duration::from_millis(10));
    let second = NameServer::on(second, BTreeMap::new(), Duration::ZERO);
    let dir = TempDir::new().unwrap();
    let resolver = resolver(dir.path(), &first, TWO, "");
    assert_eq!(resolver.lookup_ip("web.").await, Ok(ips("10.0.0.1")));
    assert_eq!(second.asked(), HashSet::new());
}

#[tokio::test]
async fn after_a_failing_or_silent_name_server_the_next_is_queried() {
    let known = || BTreeMap::from([("web.", Reply::Data(vec![v4(1)]))]);
    let (first, second) = two_places().await;
    let failing = BTreeMap::from([("web.", Reply::Code(ResponseCode::ServFail))]);
    let first = NameServer::on(first, failing, Duration::ZERO);
    let _second = NameServer::on(second, known(), Duration::from_millis(50));
    let dir = TempDir::new().unwrap();
    let failed = resolver(dir.path(), &first, TWO, "");
    assert_eq!(failed.lookup_ip("web.").await, Ok(ips("10.0.0.1")));

    let (_silent, second) = two_places().await;
    let second = NameServer::on(second, known(), Duration::ZERO);
    let silent = resolver(dir.path(), &second, TWO, "");
    assert_eq!(silent.lookup_ip("web.").await, Ok(ips("10.0.0.1")));
}

#[tokio::test]
async fn the_hosts_file_and_localhost_come_before_dns() {
    let pinned = Reply::Data(vec![v4(1)]);
    let server = NameServer::start(BTreeMap::from([("pinned.ns.svc.test.", pinned)])).await;
    let dir = TempDir::new().unwrap();
    let hosts = "10.7.7.7 Pinned alias # note\nfd07::7 pinned\n";
    let resolver = resolver(dir.path(), &server, CONF, hosts);
    for (name, found) in [
        ("pinned", "fd07::7 10.7.7.7"),
        ("ALIAS", "10.7.7.7"),
        ("localhost", "::1 127.0.0.1"),
    ] {
        assert_eq!(resolver.lookup_ip(name).await, Ok(ips(found)), "{name}");
    }
    assert_eq!(server.asked(), HashSet::new());
}

#[tokio::test]
async fn unanswered_aaaa_queries_cost_less_than_an_attempt() {
    let (_server, _dir, resolver) = start(
        BTreeMap::from([("half.", Reply::Silence)]),
        "nameserver 127.0.0.1\n",
    )
    .await;
    let start = Instant::now();
    assert_eq!(resolver.lookup_ip("half.").await, Ok(ips("10.0.0.9")));
    assert!(start.elapsed() < ATTEMPT_MAX, "{:?}", start.elapsed());
}

/// The DNS library's own parser rejects these interface names; without name servers 127.0.0.1 would be queried.
#[tokio::test]
async fn name_servers_with_zones_are_used() {
    let conf = "nameserver fe80::1%eth0.7\nnameserver fe80::1%br-lan\n";
    let (_server, _dir, resolver) = start(BTreeMap::new(), conf).await;
    assert_eq!(resolver.config.active.load().conf.name_servers.len(), 2);
}

#[tokio::test]
async fn services_are_found_by_srv() {
    let target = Name::from_ascii("node1.test.").unwrap();
    let on = Reply::Data(vec![RData::SRV(SRV::new(1, 2, 8091, target))]);
    let off = Reply::Data(vec![RData::SRV(SRV::new(0, 0, 0, Name::root()))]);
    let zone = BTreeMap::from([("_adit._tcp.ns.svc.test.", on), ("_off._tcp.test.", off)]);
    let (_server, _dir, resolver) = start(zone, CONF).await;
    let expected = SrvRecord {
        priority: 1,
        weight: 2,
        port: 8091,
        target: "node1.test.".to_owned(),
    };
    assert_eq!(resolver.lookup_srv("_adit._tcp").await, Ok(vec![expected]));
    let off = resolver.lookup_srv("_off._tcp.test.").await;
    assert_eq!(off, Err(ResolveError::NotFound));
}

#[tokio::test]
async fn without_a_configuration_the_local_name_server_is_asked() {
    let server = NameServer::start(BTreeMap::from([("web.", Reply::Data(vec![v4(1)]))])).await;
    let missing = PathBuf::from("/nonexistent/file");
    let files = Files {
        resolv_conf: missing.clone(),
        hosts: missing,
        dns_port: server.port,
        own_sockets: OwnSockets::off(),
    };
    let resolver = SystemResolver::from_files(files, Reread::default()).unwrap();
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));
}

#[tokio::test]
async fn a_file_without_name_servers_keeps_its_search_domains() {
    let zone = BTreeMap::from([("web.svc.test.", Reply::Data(vec![v4(1)]))]);
    let conf = "search svc.test\nnameserver 127.0.0.300\n";
    let (_server, _dir, resolver) = start(zone, conf).await;
    assert_eq!(resolver.lookup_ip("web").await, Ok(ips("10.0.0.1")));
}

#[tokio::test]
async fn with_rotate_each_lookup_begins_at_the_next_name_server() {
    let (first, second) = two_places().await;
    let known = || BTreeMap::from(["a.", "b."].map(|name| (name, Reply::Data(vec![v4(1)]))));
    let first = NameServer::on(first, known(), Duration::ZERO);
    let second = NameServer::on(second, known(), Duration::ZERO);
    let dir = TempDir::new().unwrap();
    let conf = TWO.to_owned() + "options rotate\n";
    let resolver = resolver(dir.path(), &first, &conf, "");
    for name in ["a.", "b."] {
        assert_eq!(resolver.lookup_ip(name).await, Ok(ips("10.0.0.1")));
    }
    // Each server got the two queries of one name: A and AAAA.
    assert_eq!((first.asked().len(), second.asked().len()), (2, 2));
}

#[tokio::test]
async fn with_use_vc_nothing_is_asked_over_udp() {
    let conf = "nameserver 127.0.0.1\noptions use-vc attempts:1\n";
    let (server, _dir, resolver) =
        start(BTreeMap::from([("web.", Reply::Data(vec![v4(1)]))]), conf).await;
    let refused = resolver.lookup_ip("web.").await.unwrap_err();
    assert_ne!(refused, ResolveError::NotFound);
    assert_eq!(server.asked(), HashSet::new());
}

/// Limit (peers): Names being looked up | 128 per resolver; others wait
#[tokio::test]
async fn unanswered_names_do_not_block_other_names() {
    const SLOTS: usize = 4;
    let zone = BTreeMap::from([
        ("known.", Reply::Data(vec![v4(1)])),
        ("good.", Reply::Data(vec![v4(2)])),
    ]);
    let (server, _dir, mut resolver) = start(zone, "nameserver 127.0.0.1\n").await;
    resolver.limit = Arc::new(YieldingSlots::new(SLOTS));
    *resolver.config.next_check.lock().unwrap() = Instant::now() + Duration::from_secs(3600);
    let resolver = Arc::new(resolver);
    assert_eq!(resolver.lookup_ip("known.").await, Ok(ips("10.0.0.1")));

    let names = (0..3 * SLOTS).map(|number| format!("n{number}.dead."));
    let _dead = look_up(&resolver, names);
    server.asked_for_dead(SLOTS).await;
    let known = resolver.lookup_ip("Known.").now_or_never();
    assert_eq!(known, Some(Ok(ips("10.0.0.1"))), "it needs no slot");
    let sibling = resolver.sibling();
    let sibling = timeout(Duration::from_millis(400), sibling.lookup_ip("good.")).await;
    assert_eq!(sibling, Ok(Ok(ips("10.0.0.2"))), "it has slots of its own");
    // Three rounds of dead names come first: 0.5 s each, but at least 2 s each if none yielded.
    let good = timeout(Duration::from_secs(4), resolver.lookup_ip("good.")).await;
    assert_eq!(good, Ok(Ok(ips("10.0.0.2"))));
}

#[tokio::test]
async fn many_lookups_of_one_name_take_one_slot() {
    let zone = BTreeMap::from([("good.", Reply::Data(vec![v4(2)]))]);
    let (server, _dir, mut resolver) = start(zone, "nameserver 127.0.0.1\n").await;
    resolver.limit = Arc::new(YieldingSlots::new(2));
    let resolver = Arc::new(resolver);
    let names = (0..100).map(|number| ["one.dead.", "ONE.dead."][number % 2].to_owned());
    let _dead = look_up(&resolver, names);
    server.asked_for_dead(1).await;
    // Behind a hundred lookups it would wait for half a minute.
    let good = timeout(Duration::from_secs(15), resolver.lookup_ip("good.")).await;
    assert_eq!(good, Ok(Ok(ips("10.0.0.2"))));
}
