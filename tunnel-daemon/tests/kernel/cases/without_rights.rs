//! Server and agent without any capability, with flags for all eBPF features: tunnels work, and the programs report what is
//! missing.

use std::os::unix::process::CommandExt as _;

use adit_host::cgroup::cgroup2_mount;
use adit_testkit::http;

use super::account_tunnels::{Moved, World, child, drive, odd_sizes, said};
use crate::support::accounting::sample;
use crate::support::confined::NOBODY;
use crate::support::privilege::skip;

const TEST: &str = "starting without rights";
/// Parts of `/readyz?verbose` that report missing rights.
const LACKING: [&str; 2] = ["[-]redirect missing: ", "[-]account unavailable: "];

/// Limit (redirect): Missing rights or cgroups of the redirect
#[test]
fn unprivileged_programs_serve_and_report_missing_capabilities() {
    if !rustix::process::geteuid().is_root() {
        return skip(TEST, "only root can give them up");
    }
    // Without cgroup2 that would be the missing part.
    let cgroup = match cgroup2_mount() {
        Ok(cgroup) => cgroup,
        Err(why) => return skip(TEST, &why),
    };
    let mut child = child("cases::without_rights::child_without_rights", |command| {
        command.uid(NOBODY).gid(NOBODY);
    });
    // Proves that the child test ran to its end.
    assert_eq!(
        said(&mut child, "worked with "),
        cgroup.display().to_string()
    );
    assert!(child.wait().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by unprivileged_programs_serve_and_report_missing_capabilities"]
async fn child_without_rights() {
    let mount = cgroup2_mount().unwrap();
    let cgroup = format!("--redirect-cgroup={}", mount.display());
    let of_server = vec!["--redirect=198.51.100.0/24".to_owned(), cgroup.clone()];
    let service = "--redirect-apiserver=198.51.100.1:443=127.0.0.1:443".to_owned();
    let world = World::start_with("4", of_server, vec![service, cgroup]).await;
    drive(&world, &odd_sizes::<2>(), &mut Moved::default()).await;
    for (health, scrape) in [
        (world.server.health, world.server.metrics.scrape()),
        (world.agent.health, world.agent.metrics.scrape()),
    ] {
        let answer = http::get(health.unwrap(), "/readyz?verbose").unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
        let answer = answer.text;
        for lacking in LACKING {
            let lines: Vec<&str> = answer
                .lines()
                .filter(|line| line.starts_with(lacking))
                .collect();
            assert!(lines.len() == 1 && lines[0].contains("CAP_BPF"), "{answer}");
        }
        let missing = "adit_redirect_state{state=\"missing\"}";
        assert_eq!(sample(&scrape, missing), Some(1));
        assert_eq!(sample(&scrape, "adit_ebpf_account_attached"), Some(0));
    }
    println!("worked with {}", mount.display());
}
