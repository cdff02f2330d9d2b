//! Flags of peers.

use tempfile::TempDir;

use super::{says, server, words};
use crate::ConfigError;
use crate::plan::{PeerAddress, PeersPlan, TlsFiles};

/// Required flags of a server besides those of its peers.
const BASE: [&str; 2] = ["--frontend=grpc=unix:/run/a.sock", "--cluster-ca-cert=PEM"];

/// Certificate, key and CA of peers.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for name in ["peer.crt", "peer.key", "peers-ca.crt", "peers.crl"] {
            std::fs::write(dir.path().join(name), "content is not looked at").unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// The flags of certificates.
    fn flags(&self) -> [String; 3] {
        [
            ("peer-cert", "peer.crt"),
            ("peer-key", "peer.key"),
            ("peer-ca-cert", "peers-ca.crt"),
        ]
        .map(|(flag, name)| format!("--{flag}={}", self.path(name)))
    }

    /// A server with these certificates and `more`.
    fn server(&self, more: &[&str]) -> Result<PeersPlan, ConfigError> {
        let own = self.flags();
        let own = own.iter().map(String::as_str);
        let args: Vec<&str> = BASE
            .into_iter()
            .chain(own)
            .chain(more.iter().copied())
            .collect();
        let (plan, warnings) = server(&args)?;
        assert_eq!(warnings, Vec::<String>::new());
        Ok(plan.peers.clone().expect("peers"))
    }
}

#[track_caller]
fn refuses(plan: Result<PeersPlan, ConfigError>, parts: &[&str]) {
    let error = plan.expect_err(parts[0]);
    for part in parts {
        says(&error, part);
    }
}

#[test]
fn without_flags_there_are_no_peers() {
    let (plan, _warnings) = server(&BASE).unwrap();
    assert_eq!(plan.peers, None);
    let (plan, _warnings) = server(&[&BASE[..], &["--zone=a"]].concat()).unwrap();
    assert_eq!(plan.peers, None);
}

/// Limit (peers): Peers of a server | 64 addresses and 64 networks
#[test]
fn peers_are_planned_as_typed_and_defaults_are_safe() {
    let files = Files::new();
    let plan = files
        .server(&words(
            "--peer=10.0.0.7:8096 --peer=[::1]:8096 --peer=dns:peers.example:8096 --peer-network=10.0.0.0/8",
        ))
        .unwrap();
    let file = |name: &str| files.path(name).into();
    let peers = ["10.0.0.7:8096", "[::1]:8096", "dns:peers.example:8096"];
    let expected = PeersPlan {
        bind: None,
        tls: TlsFiles {
            cert: file("peer.crt"),
            key: file("peer.key"),
            client_ca: Some(file("peers-ca.crt")),
        },
        crl: None,
        peers: peers.map(|text| PeerAddress::parse(text).unwrap()).to_vec(),
        networks: vec!["10.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()],
        group: "default".to_owned(),
        agent_links: 2.try_into().unwrap(),
    };
    assert_eq!(plan, expected);

    let crl = format!("--peer-crl={}", files.path("peers.crl"));
    let group = format!("--peer-group={}", "g".repeat(64));
    let plan = files
        .server(&["--peer-bind=:8096", &crl, &group, "--peer-agent-links=3"])
        .unwrap();
    assert_eq!(plan.bind.unwrap().to_string(), ":8096");
    assert_eq!(plan.crl, Some(file("peers.crl")));
    assert_eq!((plan.group.len(), plan.agent_links.get()), (64, 3));
    assert_eq!((plan.peers, plan.networks), (Vec::new(), Vec::new()));

    let peers: Vec<String> = (1..=64)
        .map(|port| format!("--peer=10.0.0.1:{port}"))
        .collect();
    let peers: Vec<&str> = peers.iter().map(String::as_str).collect();
    assert_eq!(files.server(&peers).unwrap().peers.len(), 64);
    refuses(
        files.server(&[&peers[..], &["--peer=10.0.0.1:65"]].concat()),
        &["65 values of --peer ", "at most 64", "dns:NAME:PORT"],
    );
}

#[test]
fn each_flag_of_peers_needs_all_certificates() {
    let files = Files::new();
    let crl = format!("--peer-crl={}", files.path("peers.crl"));
    let [cert, key, ca] = files.flags();
    let rest = [
        "--peer-bind=:8096",
        "--peer=10.0.0.1:8096",
        "--peer-network=10.0.0.0/8",
        &crl,
        "--peer-group=a",
        "--peer-agent-links=2",
    ];
    let alone = rest.iter().map(|flag| vec![*flag]);
    let pairs = [[&cert, &key], [&cert, &ca], [&key, &ca]];
    let pairs = pairs.map(|pair| pair.map(String::as_str).to_vec());
    for flags in alone.chain(pairs) {
        let error = server(&[&BASE[..], &flags].concat()).unwrap_err();
        let named = flags[0].split('=').next().unwrap();
        says(&error, &format!("{named} needs the certificates of peers"));
        says(&error, "give --peer-cert, --peer-key and --peer-ca-cert");
        assert_eq!(error.exit_code(), 1);
    }
    let missing = server(&[&BASE[..], &[&cert, &key, "--peer-ca-cert=/no/ca", rest[0]]].concat());
    says(&missing.unwrap_err(), "--peer-ca-cert /no/ca: no such file");
    refuses(
        files.server(&["--peer-bind=:8096", "--peer-crl=/no/crl"]),
        &["--peer-crl /no/crl: no such file"],
    );
}

#[test]
fn a_server_asks_peers_or_is_asked() {
    refuses(Files::new().server(&[]), &["give --peer ", "--peer-bind"]);
}

/// Limit (peers): Peers of a server
#[test]
fn names_of_peers_need_networks_that_discovery_may_name() {
    let files = Files::new();
    let name = "--peer=dns:peers.example:8096";
    // A literal address says nothing about the addresses of a name.
    for more in [&[name][..], &["--peer=10.0.0.1:8096", name]] {
        refuses(
            files.server(more),
            &["--peer dns:peers.example:8096", "give --peer-network"],
        );
    }
    for (network, told) in [
        ("0.0.0.0/0", "any host"),
        ("::/0", "any host"),
        ("::ffff:0:0/96", "any host"),
        ("127.0.0.0/8", "loopback"),
        ("::1", "loopback"),
        ("169.254.169.254", "link-local"),
        ("fe80::/10", "link-local"),
        ("servers", "ADDRESS/BITS"),
    ] {
        let network = format!("--peer-network={network}");
        refuses(files.server(&[name, &network]), &["--peer-network", told]);
    }
    let networks: Vec<String> = (0..65)
        .map(|byte| format!("--peer-network=10.{byte}.0.0/16"))
        .collect();
    let networks: Vec<&str> = networks.iter().map(String::as_str).collect();
    refuses(
        files.server(&[&[name][..], &networks].concat()),
        &["65 values of --peer-network", "at most 64", "join networks"],
    );
    let plan = files
        .server(&[&[name][..], &networks[..64]].concat())
        .unwrap();
    assert_eq!(plan.networks.len(), 64);
    // Bits behind the prefix are no part of a network.
    let plan = files.server(&[name, "--peer-network=10.1.2.3/8"]).unwrap();
    assert_eq!(plan.networks, ["10.0.0.0/8".parse().unwrap()]);
}

#[test]
fn a_group_is_the_value_of_a_header() {
    let files = Files::new();
    let long = "g".repeat(65);
    for (group, told) in [
        ("", "has 0 bytes"),
        (long.as_str(), "name of 1 to 64"),
        ("\u{e9}st", "cannot be sent in a gRPC header"),
        ("a\tb", "cannot be sent in a gRPC header"),
        (" a", "a space: leave it out"),
        ("a ", "a space: leave it out"),
    ] {
        let group = format!("--peer-group={group}");
        refuses(
            files.server(&["--peer-bind=:8096", &group]),
            &["--peer-group", told],
        );
    }
    for links in ["0", "65", "x"] {
        let links = format!("--peer-agent-links={links}");
        refuses(
            files.server(&["--peer-bind=:8096", &links]),
            &["--peer-agent-links", "from 1 to 64"],
        );
    }
}

/// Else an agent or a client could connect as a peer.
#[test]
fn peers_have_a_ca_of_their_own() {
    let files = Files::new();
    let (certificates, ca) = (files.flags(), files.path("peers-ca.crt"));
    let certificates = certificates.each_ref().map(String::as_str);
    let tcp = words("--frontend=http-connect=tcp::0 --server-cert=PEM --server-key=PEM");
    for (flag, base) in [
        ("--cluster-ca-cert", vec![BASE[0]]),
        ("--server-ca-cert", [&tcp[..], &[BASE[1]]].concat()),
    ] {
        // Another spelling of the same path.
        for spelled in [ca.clone(), ca.replace("/peers-ca", "//peers-ca")] {
            let shared = format!("{flag}={spelled}");
            let more = ["--peer-bind=:8096", &shared];
            let error = server(&[&base[..], &certificates, &more].concat()).unwrap_err();
            says(
                &error,
                &format!("--peer-ca-cert and {flag} are one authority"),
            );
            says(&error, "authority of their own");
            says(&error, &ca);
        }
    }
}

#[test]
fn the_listener_of_peers_has_an_address_of_its_own() {
    let files = Files::new();
    refuses(
        files.server(&["--peer-bind=:8091"]),
        &["two listeners want :8091", "--peer-bind", "--agent-port"],
    );
    refuses(
        files.server(&["--peer-bind=8096"]),
        &["--peer-bind", "HOST:PORT"],
    );
}
