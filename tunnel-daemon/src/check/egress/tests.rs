//! Files, and what kube-apiserver makes of them. The effects are those of kube-apiserver 1.36, found by giving its own package
//! the same files.

use std::path::Path;

use super::file::decode;
use super::finding::Effect::{self, DialsFail, NoStart, Panic, Works};
use super::judge::{Judged, Protocol, Route, judge};
use crate::check::egress::finding::Finding;
use crate::status::model::Verdict;

const HEAD: &str = "apiVersion: apiserver.k8s.io/v1beta1\nkind: EgressSelectorConfiguration\n";
const OLD_HEAD: &str = "apiVersion: apiserver.k8s.io/v1alpha1\nkind: EgressSelectorConfiguration\n";
const UNIX: &str = "{proxyProtocol: GRPC, transport: {uds: {udsName: /run/s}}}";

/// A file with these selections: name and connection.
fn file(head: &str, selections: &[(&str, &str)]) -> String {
    let each = selections.iter();
    let each =
        each.map(|(name, connection)| format!("- name: {name}\n  connection: {connection}\n"));
    format!("{head}egressSelections:\n{}", each.collect::<String>())
}

fn judged(text: &str) -> Judged {
    judge(decode(text))
}

/// The only finding of this effect, which must contain `part` in text or remedy.
#[track_caller]
fn finds(text: &str, effect: Effect, part: &str) {
    let Judged { findings, .. } = judged(text);
    let is_it = |found: &&Finding| {
        found.effect == effect && format!("{}; {}", found.what, found.remedy).contains(part)
    };
    let count = findings.iter().filter(is_it).count();
    assert_eq!(count, 1, "{effect:?} {part:?} in {findings:?} of\n{text}");
    let worst = findings.iter().filter(|found| found.effect != Works);
    let expected = usize::from(effect != Works);
    assert_eq!(worst.count(), expected, "{findings:?} of\n{text}");
}

/// A file whose selection `cluster` has this connection.
fn cluster(connection: &str) -> String {
    file(HEAD, &[("cluster", connection)])
}

/// HTTPConnect to `url`, with the files of a folder that has `c.crt` and `c.key`.
fn https(dir: &Path, url: &str) -> String {
    let dir = dir.display();
    cluster(&format!(
        "{{proxyProtocol: HTTPConnect, transport: {{tcp: {{url: \"{url}\", tlsConfig: {{caBundle: {dir}/c.crt, \
         clientCert: {dir}/c.crt, clientKey: {dir}/c.key}}}}}}}}"
    ))
}

fn with_files() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["c.crt", "c.key"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    dir
}

#[test]
fn files_that_kube_apiserver_uses_give_their_routes() {
    let unix = |protocol| Route::Unix {
        protocol,
        path: "/run/s".to_owned(),
    };
    for (text, expected) in [
        (cluster(UNIX), vec![("cluster", unix(Protocol::Grpc))]),
        (
            cluster(&UNIX.replace("GRPC", "HTTPConnect")),
            vec![("cluster", unix(Protocol::HttpConnect))],
        ),
        // Case of a name does not count, master is an older name, and one server is one route.
        (
            file(
                HEAD,
                &[
                    ("Cluster", UNIX),
                    ("master", UNIX),
                    ("etcd", "{proxyProtocol: Direct}"),
                ],
            ),
            vec![
                ("cluster, controlplane", unix(Protocol::Grpc)),
                ("etcd", Route::Direct),
            ],
        ),
        (
            r#"{"apiVersion":"apiserver.k8s.io/v1beta1","kind":"EgressSelectorConfiguration","egressSelections":[
                {"name":"cluster","connection":{"proxyProtocol":"GRPC","transport":{"uds":{"udsName":"/run/s"}}}}]}"#
                .to_owned(),
            vec![("cluster", unix(Protocol::Grpc))],
        ),
    ] {
        let Judged { routes, findings } = judged(&text);
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(name, route)| (name.to_owned(), route))
            .collect();
        assert_eq!(routes, expected, "{text}");
        assert!(findings.is_empty(), "{findings:?} of {text}");
    }
    let dir = with_files();
    for (url, host) in [
        ("https://konnectivity.example:8131", "konnectivity.example"),
        ("https://[::1]:8131/", "::1"),
        ("https://user@192.0.2.1:8131", "192.0.2.1"),
    ] {
        let Judged { routes, findings } = judged(&https(dir.path(), url));
        let [(_, Route::Tls(route))] = &routes[..] else {
            panic!("{url}: {routes:?}, {findings:?}");
        };
        assert_eq!((route.host.as_str(), route.port), (host, 8131), "{url}");
        assert!(findings.is_empty(), "{findings:?} of {url}");
    }
}

#[test]
fn a_file_that_kube_apiserver_does_not_decode_is_named() {
    let ok = cluster(UNIX);
    for (text, part) in [
        (String::new(), "empty"),
        ("hello".to_owned(), "no object"),
        (
            ok.replace("kind: Egress", "kind: Ingress"),
            "kind is \"IngressSelector",
        ),
        (
            ok.replace("v1beta1", "v1"),
            "write apiVersion: apiserver.k8s.io/v1beta1",
        ),
        (
            ok.replace("apiserver.k8s", "apiserver.config.k8s"),
            "apiserver.config.k8s.io",
        ),
        (
            ok.replace("udsName", "udsname"),
            "uds.udsname is unknown; write udsName",
        ),
        (
            format!("{ok}metadata: {{name: a}}\n"),
            "metadata is unknown",
        ),
        (
            cluster("{proxyProtocol: GRPC, transport: {uds: {udsName: /a, tlsConfig: {}}}}"),
            "a unix socket has none",
        ),
        (
            cluster("{proxyProtocol: GRPC, transport: {uds: /a}}"),
            "uds is no object",
        ),
        (cluster(&UNIX.replace("/run/s", "5")), "udsName is no text"),
        (
            format!("{HEAD}egressSelections: {{}}\n"),
            "egressSelections is no list",
        ),
        (format!("{HEAD}{ok}"), "no valid YAML or JSON"),
        (format!("{ok}\t- x\n"), "no valid YAML or JSON"),
        (
            format!("{HEAD}egressSelections:\n- cluster\n"),
            "egressSelections[0] is no object",
        ),
    ] {
        finds(&text, NoStart, part);
        assert!(judged(&text).routes.is_empty(), "{text}");
    }
    // For users, and not for those who call the library.
    let Judged { findings, .. } = judged(&format!("{HEAD}{ok}"));
    assert!(
        findings.iter().all(|found| !found.what.contains("Options")),
        "{findings:?}"
    );
    let old = file(OLD_HEAD, &[("cluster", "{type: http-connect}")]);
    finds(&old, NoStart, "Kubernetes 1.17");
}

#[test]
fn names_of_selections_are_judged_as_kube_apiserver_does() {
    for (text, effect, part) in [
        (
            file(HEAD, &[("cluster", UNIX), ("clusters", UNIX)]),
            NoStart,
            "names are cluster, controlplane, etcd",
        ),
        (
            file(HEAD, &[("cluster", UNIX), ("CLUSTER", UNIX)]),
            NoStart,
            "cluster is selected twice",
        ),
        (
            file(HEAD, &[("cluster", UNIX), ("Master", UNIX)]),
            NoStart,
            "in lower case",
        ),
        (
            file(
                HEAD,
                &[("cluster", UNIX), ("master", UNIX), ("controlplane", UNIX)],
            ),
            NoStart,
            "controlplane is selected twice",
        ),
        (
            file(HEAD, &[("cluster", UNIX), ("''", UNIX)]),
            NoStart,
            "egressSelections[1] has no name",
        ),
        (
            file(OLD_HEAD, &[("cluster", UNIX), ("master", UNIX)]),
            Works,
            "older one",
        ),
        (
            file(HEAD, &[("controlplane", UNIX)]),
            Works,
            "no selection is named cluster",
        ),
        (HEAD.to_owned(), Works, "no selection is named cluster"),
        (
            format!("{}---\n{HEAD}", cluster(UNIX)),
            Works,
            "several documents",
        ),
        (
            cluster("{proxyProtocol: Direct}"),
            Works,
            "without a tunnel",
        ),
        (
            file(HEAD, &[("cluster", UNIX), ("etcd", UNIX)]),
            Works,
            "not ready before",
        ),
    ] {
        finds(&text, effect, part);
    }
}

#[test]
fn connections_are_judged_as_kube_apiserver_does() {
    let http = |rest: &str| {
        cluster(&format!(
            "{{proxyProtocol: HTTPConnect, transport: {{{rest}}}}}"
        ))
    };
    for (text, effect, part) in [
        (
            cluster(&UNIX.replace("GRPC", "grpc")),
            NoStart,
            "write GRPC: upper",
        ),
        (
            cluster(&UNIX.replace("GRPC", "httpConnect")),
            NoStart,
            "write HTTPConnect: upper",
        ),
        (
            cluster(&UNIX.replace("GRPC", "http-connect")),
            NoStart,
            "write HTTPConnect: upper",
        ),
        (
            cluster(&UNIX.replace("GRPC", "tls")),
            NoStart,
            "write one of GRPC",
        ),
        (
            cluster("{transport: {uds: {udsName: /a}}}"),
            NoStart,
            "has no proxyProtocol",
        ),
        (cluster("null"), NoStart, "has no proxyProtocol"),
        (
            cluster("{proxyProtocol: Direct, transport: {}}"),
            NoStart,
            "remove the transport",
        ),
        (
            cluster("{proxyProtocol: GRPC}"),
            NoStart,
            "there is no transport",
        ),
        (
            cluster("{proxyProtocol: GRPC, transport: {tcp: {url: 'https://a:1'}}}"),
            NoStart,
            "unix sockets only",
        ),
        (
            cluster("{proxyProtocol: GRPC, transport: {tcp: {}, uds: {udsName: /a}}}"),
            Works,
            "ignores transport.tcp",
        ),
        (
            http("tcp: {url: x}, uds: {udsName: /a}"),
            NoStart,
            "there are both",
        ),
        (http(""), NoStart, "there are none"),
        (http("uds: {}"), NoStart, "has no udsName"),
        (
            http("uds: {udsName: 'unix:///run/s'}"),
            DialsFail,
            "write /run/s",
        ),
        (
            http(&format!("uds: {{udsName: /{}}}", "a".repeat(107))),
            DialsFail,
            "108 bytes",
        ),
        (http("uds: {udsName: s.sock}"), Works, "working directory"),
        (http("tcp: {url: 'http://a:1'}"), Panic, "without TLS"),
        (
            http("tcp: {url: 'http://a:1', tlsConfig: {}}"),
            NoStart,
            "there is a tlsConfig",
        ),
        (http("tcp: {url: 'HTTPS://a:1'}"), NoStart, "in lower case"),
        (
            http("tcp: {url: 'https://a:1'}"),
            NoStart,
            "needs transport.tcp.tlsConfig",
        ),
        (
            http("tcp: {url: 'https://a:1', tlsConfig: {clientCert: /proc/version}}"),
            NoStart,
            "no clientKey",
        ),
        (
            http(
                "tcp: {url: 'https://a:1', tlsConfig: {clientCert: /proc/version, clientKey: /nonexistent/key}}",
            ),
            NoStart,
            "/nonexistent/key does not exist",
        ),
        (
            http(
                "tcp: {url: 'https://a:1', tlsConfig: {clientCert: /proc/version, clientKey: /proc/version}}",
            ),
            Works,
            "public CAs",
        ),
    ] {
        finds(&text, effect, part);
    }
}

#[test]
fn urls_are_judged_as_kube_apiserver_does() {
    let dir = with_files();
    for (url, effect, part) in [
        ("https://h", DialsFail, "no port"),
        ("https://h:", DialsFail, "no port"),
        ("https://h:99999", DialsFail, "1 to 65535"),
        ("https://:1", DialsFail, "has no host"),
        ("https://h:x", NoStart, "is no URL"),
        ("https://h h:1", NoStart, "is no URL"),
        ("https://h:1/path?q", Works, "behind h:1"),
    ] {
        finds(&https(dir.path(), url), effect, part);
    }
}

#[test]
fn each_effect_has_its_verdict_and_words() {
    for (effect, verdict, part) in [
        (NoStart, Verdict::Missing, "does not start"),
        (Panic, Verdict::Missing, "panics"),
        (DialsFail, Verdict::Missing, "each of its connections"),
        (Works, Verdict::Degraded, "what"),
    ] {
        let line = Finding::new(effect, "what", "remedy").line();
        assert_eq!(
            (line.verdict, line.remedy.as_deref()),
            (verdict, Some("remedy"))
        );
        assert!(line.text.contains(part), "{line:?}");
    }
}
