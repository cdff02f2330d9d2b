//! Errors in entries of grants, deny lists and client rules.

use crate::destination::EntryError;

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Flaw {
    #[error("{0:?} is not KEY=VALUE; write such as cn=node-1,id=node-1,host=node-1.example")]
    NotPair(String),
    #[error(
        "unknown key {0:?}: cn, dns and uri name a certificate, serviceaccount and node a token; id, host, ipv4, ipv6, cidr, \
         default-route and zone say what may be claimed"
    )]
    UnknownKey(String),
    #[error("{0} has no value; * stands for any")]
    Empty(&'static str),
    #[error("{0} has more than one *; write several grants")]
    Stars(&'static str),
    #[error("{{*}} or {{node}} in a name; write * there, and the braces in a claim")]
    CaptureInName,
    #[error("{{*}} needs exactly one * among the names, to say what it stands for")]
    Capture,
    #[error(
        "{{node}} is that of a token: name its holder by serviceaccount=NAMESPACE/NAME or node="
    )]
    NodeOfCertificate,
    #[error("names a certificate and a token; write a grant for each")]
    TwoKinds,
    #[error("serviceaccount={0} is not NAMESPACE/NAME")]
    NotAnAccount(String),
    #[error(
        "{0:?} is no KEY=VALUE with one of the keys id, cn, dns, uri, serviceaccount, node, pod"
    )]
    NotDenied(String),
    #[error("{0:?} names no certificate: write cn=, dns= or uri=, and the target last")]
    NotOfCertificate(String),
    #[error("{0}")]
    Target(EntryError),
    #[error("stands alone; leave it or the other entries out")]
    NotAlone,
    #[error("{key}={value} is no {key} address or network; write such as {example}")]
    Net {
        key: &'static str,
        value: String,
        example: &'static str,
    },
    #[error("host={0} is an address; write ipv4= or ipv6=")]
    HostIsAddress(String),
    #[error("default-route={0} is not true; leave it out to grant none")]
    DefaultRoute(String),
    #[error(
        "names no certificate and no token; add cn=, dns= or uri= of a certificate, or serviceaccount= of a token"
    )]
    NoName,
    #[error("grants nothing; add id=, and the identifiers that may be claimed")]
    NoClaim,
}
