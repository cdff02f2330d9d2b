//! Tests of the bounds on stored answers.

use super::*;

/// Limit (peers): Addresses kept of one name | 64, half of each IP family that has as many
#[tokio::test]
async fn a_name_keeps_at_most_64_addresses_of_both_families() {
    let many_v4 = || (0..70).map(v4);
    let v6 = |last: u16| RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
    let zone = BTreeMap::from([
        ("one.test.", Reply::Data(many_v4().collect())),
        (
            "both.test.",
            Reply::Data(many_v4().chain((0..40).map(v6)).collect()),
        ),
        (
            "few.test.",
            Reply::Data(many_v4().chain((0..2).map(v6)).collect()),
        ),
    ]);
    let (dir, server) = (TempDir::new().unwrap(), NameServer::start(zone).await);
    let resolver = resolver(
        dir.path(),
        &server,
        "nameserver 127.0.0.1\noptions edns0\n",
        "",
    );
    for (name, v6) in [("one.test.", 0), ("both.test.", 32), ("few.test.", 2)] {
        let ips = resolver.lookup_ip(name).await.unwrap();
        assert_eq!(ips.len(), ADDRESSES_MAX, "{name}");
        assert_eq!(ips.iter().filter(|ip| ip.is_ipv6()).count(), v6, "{name}");
    }
}

/// Limit (peers): Names whose answers the DNS library keeps | 64 per name server
#[tokio::test]
async fn the_dns_library_keeps_answers_for_64_names() {
    let (dir, server) = (
        TempDir::new().unwrap(),
        NameServer::start(BTreeMap::new()).await,
    );
    let resolver = resolver(dir.path(), &server, "nameserver 127.0.0.1\n", "");
    let config = resolver.config.current().await;
    assert_eq!(config.dns.answers_max(), [64]);
}
