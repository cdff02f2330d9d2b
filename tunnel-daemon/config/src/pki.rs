//! Options of `adit pki`.

use std::path::PathBuf;

use crate::units::number;

/// Validity of authorities in days: ten years.
const AUTHORITY_DAYS: &str = "3650";
/// Validity of certificates in days: a year, as kubeadm's.
const CERTIFICATE_DAYS: &str = "365";
/// A hundred years; some programs cannot read later dates.
const DAYS_MAX: u32 = 36_500;

/// What to make or show.
#[derive(clap::Subcommand, Clone, PartialEq, Eq, Debug)]
pub enum PkiOptions {
    /// Make three authorities: for agents, for clients, for servers as peers
    Init(PkiInit),
    /// Make a server's certificates: for agents, for clients, for peers
    Server(PkiServer),
    /// Make the certificate of an agent
    Agent(PkiAgent),
    /// Make the certificate of a client, such as kube-apiserver
    Client(PkiClient),
    /// Show what is in certificates
    Show(PkiShow),
}

/// Options of `adit pki init`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiInit {
    /// Where the authorities go: agents-ca, clients-ca and peers-ca, each as .crt and .key; the last alone where the others are
    #[arg(long, value_name = "DIR", default_value = "pki")]
    pub dir: PathBuf,
    /// How long they are valid
    #[arg(long, value_name = "DAYS", default_value = AUTHORITY_DAYS, value_parser = days())]
    pub days: u32,
}

/// Options of all commands that sign.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiSigning {
    /// Where the authorities are, and where the files go
    #[arg(long, value_name = "DIR", default_value = "pki")]
    pub dir: PathBuf,
    /// How long the certificate is valid; at most as long as its authority
    #[arg(long, value_name = "DAYS", default_value = CERTIFICATE_DAYS, value_parser = days())]
    pub days: u32,
}

/// Options of `adit pki server`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiServer {
    /// Where, and for how long.
    #[command(flatten)]
    pub signing: PkiSigning,
    /// Names of the files: FILE.crt and .key for clients, FILE-cluster for agents, FILE-peer for peers, if there is a peers-ca
    #[arg(long, value_name = "FILE", default_value = "server")]
    pub file: String,
    /// Host names and addresses that agents, clients and peers call
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Options of `adit pki agent`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiAgent {
    /// Where, and for how long.
    #[command(flatten)]
    pub signing: PkiSigning,
    /// Its common name, which grants and deny lists know as cn; the files are agent-ID.crt and .key
    #[arg(value_name = "ID")]
    pub id: String,
}

/// Options of `adit pki client`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiClient {
    /// Where, and for how long.
    #[command(flatten)]
    pub signing: PkiSigning,
    /// Its common name, which --client-allow-target knows as cn; the files are client-NAME.crt and .key
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// Options of `adit pki show`.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct PkiShow {
    /// Files of certificates, PEM
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
}

fn days() -> impl Fn(&str) -> Result<u32, String> + Clone + Send + Sync + 'static {
    number(1..=DAYS_MAX)
}
