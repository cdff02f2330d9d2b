//! Sample answers for tests.

use super::model::{
    API, AccountStatus, AgentStatus, Capability, CertificateStatus, Descriptors, DialStatus,
    LaneStatus, LinkLanes, LinkStatus, LogStatus, Memory, PeerStatus, Readiness, RedirectFile,
    RedirectNamespaces, RedirectOthers, RedirectStatus, RelayStatus, Role, SearchStatus, Status,
    StrategyStatus, TunnelCounts, Verdict,
};

/// A status with the longest values.
pub(crate) fn status() -> Status {
    let link = LinkStatus {
        link: Some(7),
        identifiers: Some("host=a".to_owned()),
        peer: "agent-\x1b[31m-with-a-very-long-name.example.org".to_owned(),
        address: "[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".to_owned(),
        principal: Some("CN=agent".to_owned()),
        dialect: "adit".to_owned(),
        version: Some("0.1.0".to_owned()),
        age_seconds: 1_051_200,
        condition: "draining".to_owned(),
        tunnels: 9_999_999,
        held_bytes: 0,
        budget_bytes: 64 << 20,
        lanes: Some(LinkLanes {
            idle: 9999,
            busy: 9999,
            wanted: None,
            limit: 9999,
        }),
        dials: Some(DialStatus {
            answered: u64::MAX,
            slow: 1,
            failed: 2,
        }),
    };
    Status {
        api: API,
        role: Role::Server,
        version: "0.1.0".to_owned(),
        id: "s".repeat(100),
        pid: 4_194_304,
        uptime_seconds: 1e9,
        readiness: Readiness {
            ready: false,
            draining: false,
            reason: Some("no connection to any proxy agent".to_owned()),
        },
        strategies: ["destHost", "destCIDR", "defaultRoute", "\x1b[2Jdefault"]
            .map(|name| StrategyStatus {
                name: name.to_owned(),
                state: "no agent".to_owned(),
            })
            .into(),
        tunnels: TunnelCounts {
            open: u64::MAX,
            raw_lane: 17,
            ktls_lane: 9,
            ..TunnelCounts::default()
        },
        pending_dials: Some(16_384),
        links: vec![link; 50],
        links_total: 2000,
        search: Some(SearchStatus {
            linked: 3,
            known: 64,
            state: "slow".to_owned(),
            reason: Some("\x1b[2Ja announces 64".repeat(99)),
        }),
        peers: vec![
            PeerStatus {
                direction: "to".to_owned(),
                server: Some("p".repeat(100)),
                address: "[2001:db8::1:2:3]:8096".to_owned(),
                state: "linked".to_owned(),
                keys: u64::MAX,
                tunnels: u64::MAX,
                ..PeerStatus::default()
            },
            PeerStatus {
                address: "192.0.2.1:8096".to_owned(),
                state: "failed".to_owned(),
                reason: Some("\x1b[2Jrefused".to_owned()),
                ..PeerStatus::default()
            },
        ],
        server_count: None,
        lanes: LaneStatus {
            idle: 99_999,
            busy: 99_999,
            limit_per_link: 1024,
            limit: 349_000,
            security: "plaintext".to_owned(),
        },
        relay: RelayStatus {
            engine: "io-uring".to_owned(),
            reason: "as fast as io_uring in our measurements, with less of the kernel in reach"
                .to_owned(),
            used: true,
            ..RelayStatus::default()
        },
        capabilities: vec![Capability {
            name: "kernel-tls".to_owned(),
            verdict: Verdict::Missing,
            text: "the kernel was built without it, or its module is not there".to_owned(),
            remedy: None,
        }],
        privileges: Some(vec!["CAP_\x1b[31mDAC_READ_SEARCH".to_owned(); 8]),
        descriptors: Descriptors {
            in_use: 1_048_576,
            limit: None,
        },
        memory: Memory {
            held_bytes: u64::MAX,
            budget_bytes: u64::MAX,
        },
        redirect: Some(RedirectStatus {
            state: "active".to_owned(),
            cgroup: "/sys/fs/cgroup/\x1b[2J".repeat(9),
            part_of_host: true,
            others: Some(RedirectOthers {
                count: 2,
                programs: Vec::new(),
                unknown: Some("names \x1b[2Junknown".repeat(9)),
            }),
            file: Some(RedirectFile {
                path: "/rules".to_owned(),
                error: Some("line 1:\n".repeat(99)),
            }),
            namespaces: Some(RedirectNamespaces {
                reason: Some("it ended".to_owned()),
                ..RedirectNamespaces::default()
            }),
            ..RedirectStatus::default()
        }),
        account: AccountStatus {
            state: "unavailable".to_owned(),
            reason: Some("it needs \x1b[2JCAP_BPF".repeat(9)),
        },
        log: LogStatus {
            level: "info,\x1b[2Jadit=debug".repeat(9),
            debug_seconds_left: Some(899),
        },
        certificates: vec![
            certificate("/etc/adit/pki/server-cluster.crt", Some(13)),
            certificate("/etc/adit/pki/agents-ca.crt", Some(365)),
        ],
    }
}

pub(crate) fn certificate(file: &str, days_left: Option<u64>) -> CertificateStatus {
    CertificateStatus {
        file: file.to_owned(),
        kind: "certificate".to_owned(),
        expires: 4_102_444_800,
        days_left,
    }
}

pub(crate) fn agent(agent: &str, principal: Option<&str>, failed: u64) -> AgentStatus {
    AgentStatus {
        agent: agent.to_owned(),
        principal: principal.map(str::to_owned),
        dials: DialStatus {
            answered: u64::from(u32::MAX),
            slow: 2,
            failed,
        },
    }
}
