//! HyperShift's sidecars: defaults, the command lines of its components, and the operator whose place Adit can take.

use std::ffi::OsString;
use std::path::PathBuf;

use adit_kube::access::Source;
use tempfile::TempDir;

use super::defaults;
use crate::address::{BindHost, ServerAddress};
use crate::legacy::hypershift::{HttpsOptions, Socks5Options};
use crate::plan::{Dialect, FrontendListen, GuestDns, ProxyPlan, Resolver};
use crate::{Command, ConfigError, parse};

const SOCKS5: &str = "konnectivity-socks5-proxy";
const HTTPS: &str = "konnectivity-https-proxy";

fn command(argv: &[&str]) -> Result<Command, ConfigError> {
    let env = |name: &str| match name {
        "KUBECONFIG" => Some("/etc/kubernetes/kubeconfig".to_owned()),
        "HTTPS_PROXY" => Some("http://proxy.management:3128".to_owned()),
        "NO_PROXY" => Some(".amazonaws.com".to_owned()),
        _ => None,
    };
    Ok(parse(argv.iter().map(OsString::from), &env)?.command)
}

/// Certificates at other places than the default ones, which do not exist here.
struct Files(
    #[expect(dead_code, reason = "the folder lives as long as this")] TempDir,
    [String; 3],
);

impl Files {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let flags = ["ca-cert-path", "tls-cert-path", "tls-key-path"].map(|flag| {
            let path = dir.path().join(flag);
            std::fs::write(&path, "").unwrap();
            format!("--{flag}={}", path.display())
        });
        Self(dir, flags)
    }

    fn plan(&self, argv: &[&str]) -> ProxyPlan {
        let files: Vec<&str> = self.1.iter().map(String::as_str).collect();
        match command(&[argv, &files].concat()) {
            Ok(Command::Proxy(plan)) => *plan,
            other => panic!("{argv:?}: {other:?}"),
        }
    }
}

fn port(plan: &ProxyPlan) -> u16 {
    let [frontend] = plan.clients.frontends.as_slice() else {
        panic!("{plan:?}");
    };
    match &frontend.listen {
        FrontendListen::Tcp { bind, tls: None } if bind.host == BindHost::Any => bind.port,
        other => panic!("{other:?}"),
    }
}

#[test]
fn defaults_are_theirs() {
    let shared = [
        "ca-cert-path=\"/etc/konnectivity/proxy-ca/ca.crt\"",
        "konnectivity-hostname=\"konnectivity-server-local\"",
        "konnectivity-port=8090",
        "serving-port=8090",
        "tls-cert-path=\"/etc/konnectivity/proxy-client/tls.crt\"",
        "tls-key-path=\"/etc/konnectivity/proxy-client/tls.key\"",
    ];
    assert_eq!(defaults(&Socks5Options::default().flags()), shared);
    assert_eq!(defaults(&HttpsOptions::default().flags()), shared);
}

/// As the components of a hosted control plane start them: by name, and as subcommands of the operator.
#[test]
fn command_lines_of_every_component_are_understood() {
    let files = Files::new();
    let operator = "/usr/bin/control-plane-operator";
    for (component, argv, dialect, at) in [
        (
            "cluster-network-operator",
            &[SOCKS5, "run", "--disable-resolver=true"][..],
            Dialect::Socks5,
            8090,
        ),
        (
            "openshift-apiserver",
            &[HTTPS, "run"],
            Dialect::HttpProxy,
            8090,
        ),
        (
            "ingress-operator",
            &[HTTPS, "run", "--connect-directly-to-cloud-apis"],
            Dialect::HttpProxy,
            8090,
        ),
        (
            "oauth-openshift",
            &[
                HTTPS,
                "run",
                "--serving-port=8092",
                "--connect-directly-to-cloud-apis",
                "--http-proxy",
                "",
                "--https-proxy=",
            ],
            Dialect::HttpProxy,
            8092,
        ),
        (
            "oauth-openshift",
            &[
                SOCKS5,
                "--resolve-from-guest-cluster-dns=true",
                "--resolve-from-management-cluster-dns=true",
                "run",
            ],
            Dialect::Socks5,
            8090,
        ),
        (
            "openshift-oauth-apiserver",
            &[SOCKS5, "run", "--resolve-from-guest-cluster-dns=true"],
            Dialect::Socks5,
            8090,
        ),
        ("olm-operator", &[SOCKS5, "run"], Dialect::Socks5, 8090),
    ] {
        let named = files.plan(argv);
        assert_eq!(named.clients.frontends[0].dialect, dialect, "{component}");
        assert_eq!(port(&named), at, "{component}");
        assert!(named.clients.only_loopback, "{component}");
        let host = "konnectivity-server-local".to_owned();
        assert_eq!(named.servers, [ServerAddress::Host { host, port: 8090 }]);
        assert_eq!(
            named.forward_proxy.https_proxy, None,
            "theirs goes past every proxy"
        );
        let as_subcommand = files.plan(&[&[operator], argv].concat());
        let (mut one, mut other) = (format!("{named:?}"), format!("{as_subcommand:?}"));
        one = one.replace(&named.id, "");
        other = other.replace(&as_subcommand.id, "");
        assert_eq!(one, other, "{component}");
    }
}

#[test]
fn names_are_resolved_in_their_order() {
    let files = Files::new();
    let kubeconfig = Some(Source::Kubeconfig(PathBuf::from(
        "/etc/kubernetes/kubeconfig",
    )));
    let guest_dns = Some(GuestDns::Service(
        "openshift-dns".to_owned(),
        "dns-default".to_owned(),
    ));
    for (argv, resolver, services, dns, unresolved, falls_back) in [
        (
            &[SOCKS5][..],
            Resolver::Guest,
            &kubeconfig,
            &None,
            Resolver::Here,
            false,
        ),
        (
            &[
                SOCKS5,
                "--disable-resolver",
                "--resolve-from-guest-cluster-dns",
            ],
            Resolver::Agent,
            &None,
            &None,
            Resolver::Agent,
            false,
        ),
        (
            &[SOCKS5, "--resolve-from-guest-cluster-dns"],
            Resolver::Guest,
            &kubeconfig,
            &guest_dns,
            Resolver::Agent,
            false,
        ),
        (
            &[
                SOCKS5,
                "--resolve-from-guest-cluster-dns",
                "--resolve-from-management-cluster-dns",
            ],
            Resolver::Guest,
            &kubeconfig,
            &guest_dns,
            Resolver::Agent,
            true,
        ),
        (
            &[HTTPS],
            Resolver::Guest,
            &kubeconfig,
            &guest_dns,
            Resolver::Here,
            false,
        ),
    ] {
        let plan = files.plan(argv);
        let names = &plan.names;
        assert_eq!(names.resolver, resolver, "{argv:?}");
        assert_eq!(
            (&names.services, &names.guest_dns),
            (services, dns),
            "{argv:?}"
        );
        assert_eq!(
            (names.unresolved, names.falls_back),
            (unresolved, falls_back),
            "{argv:?}"
        );
    }
    assert!(files.plan(&[HTTPS, "--prefer-ipv4"]).names.prefer_ipv4);
}

/// The environment's proxy is for direct connections, whatever NO_PROXY says; a customer's proxy has its user in the URL.
#[test]
fn proxies_of_the_environment_and_of_the_customer_are_kept_apart() {
    let files = Files::new();
    let plan = files.plan(&[
        HTTPS,
        "run",
        "--connect-directly-to-cloud-apis",
        "--https-proxy",
        "https://user:p%40ss@proxy.customer:3129",
        "--http-proxy",
        "http://proxy.customer",
        "--no-proxy",
        ".svc,10.0.0.0/8",
    ]);
    assert!(plan.direct.cloud_apis);
    let proxy = &plan.direct.proxy;
    assert_eq!(
        proxy.https_proxy.as_deref(),
        Some("http://proxy.management:3128")
    );
    assert_eq!(proxy.no_proxy, None);
    assert_eq!(plan.customer.no_proxy, ".svc,10.0.0.0/8");
    let https = plan.customer.https.clone().unwrap();
    assert_eq!((https.is_tls, https.port), (true, 3129));
    assert_eq!(https.authorization().as_deref(), Some("Basic dXNlcjpwQHNz"));
    assert_eq!(
        plan.customer.hosts(),
        ["proxy.customer"],
        "a port makes the difference"
    );
    assert!(!format!("{plan:?}").contains("p@ss"));
}

#[test]
fn what_else_the_operator_does_is_left_to_it() {
    for args in [
        &["run", "--namespace", "clusters"][..],
        &[],
        &["konnectivity-socks5"],
        &["--help"],
    ] {
        let program = "/usr/bin/control-plane-operator";
        let original = PathBuf::from("/usr/bin/control-plane-operator.original");
        match command(&[&[program], args].concat()).unwrap() {
            Command::Execute {
                program,
                args: passed,
            } => {
                assert_eq!(program, original);
                assert_eq!(passed, args);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_cannot_be_used_is_named() {
    let files = Files::new();
    for (argv, named) in [
        (&[SOCKS5, "serve"][..], "\"serve\""),
        (&[SOCKS5, "run", "run"], "\"run\""),
        (&[SOCKS5, "--http-proxy=x"], "--http-proxy"),
        (&[HTTPS, "--serving-port=70000"], "--serving-port 70000"),
        (&[HTTPS, "--konnectivity-port=0"], "--konnectivity-port 0"),
        (
            &[HTTPS, "--https-proxy=socks5://a:1"],
            "--https-proxy has no usable scheme",
        ),
        (
            &[SOCKS5, "--konnectivity-hostname="],
            "--konnectivity-hostname is empty",
        ),
    ] {
        let all: Vec<&str> = argv
            .iter()
            .copied()
            .chain(files.1.iter().map(String::as_str))
            .collect();
        let error = command(&all).unwrap_err();
        assert!(
            error.message().contains(named),
            "{argv:?}: {}",
            error.message()
        );
        assert_eq!(error.exit_code(), 1, "{argv:?}");
    }
    let nothing = |_name: &str| None;
    let all = [HTTPS]
        .into_iter()
        .chain(files.1.iter().map(String::as_str));
    let error = parse(all.map(OsString::from), &nothing).unwrap_err();
    assert!(
        error.message().starts_with("KUBECONFIG is not set"),
        "{}",
        error.message()
    );
    let argv = [SOCKS5, "--disable-resolver"].into_iter();
    let all = argv.chain(files.1.iter().map(String::as_str));
    assert!(parse(all.map(OsString::from), &nothing).is_ok());
    let error = command(&[SOCKS5, "run"]).unwrap_err();
    assert!(
        error
            .message()
            .starts_with("--ca-cert-path /etc/konnectivity"),
        "{}",
        error.message()
    );
}
