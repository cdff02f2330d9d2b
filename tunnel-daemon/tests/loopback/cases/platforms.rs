//! Starts Adit with the command lines of platforms that run upstream's programs: their program names, their flags, and files at
//! their paths. Each program has its own file system and network. The Kubernetes API is not there yet, as when a control plane
//! boots.
//!
//! The test needs `unshare`, `mount` and `ip`, and root or user namespaces. docs/reference/platforms.md has the table of
//! results.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use adit_testkit::certificates::ThrowawayFiles;
use adit_testkit::http;
use adit_testkit::platforms::{End, PLATFORMS, Platform};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::process::named_program;
use crate::support::skip::skip_unprivileged;

/// Environment variable of the inner process: what to start.
const INSIDE: &str = "ADIT_TEST_PLATFORM";
/// Output of the inner process when the program serves its health port.
const STARTS: &str = "it starts";
/// Output of the inner process when the program answers `adit status`.
const OPERATED: &str = "it answers adit status";
/// The page with the table.
const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/reference/platforms.md"
);
/// Markers around the table.
const BEGIN: &str = "<!-- platforms: begin -->\n";
const END: &str = "<!-- platforms: end -->\n";
/// Time for a program to start.
const LIMIT: Duration = Duration::from_secs(30);

/// Whether the program starts. An error says why this host cannot tell. The output of a refused start is printed.
fn start(end: &End, program: &Path, files: &ThrowawayFiles, dir: &Path) -> Result<bool, String> {
    let said = start_with(end, program, files, dir, "")?;
    let starts = said.contains(STARTS);
    if !starts {
        println!("{} {:?}:\n{said}", end.called, end.flags);
    }
    Ok(starts)
}

/// The output of the program's start, with these settings in the file at its default path.
fn start_with(
    end: &End,
    program: &Path,
    files: &ThrowawayFiles,
    dir: &Path,
    settings: &str,
) -> Result<String, String> {
    let task = json!({
        "settings": settings,
        "program": program,
        "called": end.called,
        "health": end.health(),
        "flags": end.flags,
        "env": end.env,
        "files": files.dir(),
        "dir": dir,
    });
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let output = command
        .arg(std::env::current_exe().map_err(|error| error.to_string())?)
        .args(["--exact", "cases::platforms::inside", "--nocapture"])
        .env(INSIDE, task.to_string())
        .output()
        .map_err(|error| format!("running unshare: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if said.contains("cannot be prepared") || !said.contains("inside") {
        return Err(said + &String::from_utf8_lossy(&output.stderr));
    }
    Ok(said)
}

/// KKP renders upstream's flags alone; a mounted file makes its server one that can be operated. Without the file there is no
/// socket.
#[test]
fn kkps_server_has_an_admin_socket_if_the_file_at_its_default_path_says_so() {
    const TEST: &str =
        "platforms::kkps_server_has_an_admin_socket_if_the_file_at_its_default_path_says_so";
    let program = named_program().unwrap_or_else(|| env!("CARGO_BIN_EXE_adit").into());
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).unwrap();
    let dir = TempDir::new().unwrap();
    let link = dir.path().join("proxy-server");
    std::os::unix::fs::symlink(&program, &link).unwrap();
    let kkp = PLATFORMS.iter().find(|platform| platform.name == "KKP");
    let kkp = kkp.and_then(|platform| platform.server.as_ref()).unwrap();
    let mut answers = Vec::new();
    for settings in [
        "admin-socket = \"/run/adit/server.sock\"\nagent-grant = [\"node=*,id={*}\"]\n",
        "",
    ] {
        match start_with(kkp, &link, &files, dir.path(), settings) {
            Ok(said) => answers.push(said),
            Err(why) => return skip_unprivileged(TEST, why),
        }
    }
    assert!(
        answers.iter().all(|said| said.contains(STARTS)),
        "{answers:?}"
    );
    let answered = answers.iter().map(|said| said.contains(OPERATED));
    assert_eq!(answered.collect::<Vec<_>>(), [true, false], "{answers:?}");
}

/// The table for docs/reference/platforms.md.
fn table(rows: &[(&Platform, [Option<bool>; 2])]) -> String {
    let mut text = "| platform | agents prove themselves by | `adit` as its server | `adit` as its agent |\n|---|---|---|---|\n".to_owned();
    let cell = |starts: Option<bool>| match starts {
        None => "not theirs to run",
        Some(true) => "starts",
        Some(false) => "refused",
    };
    for (platform, [server, agent]) in rows {
        let Platform { name, proof, .. } = platform;
        writeln!(
            text,
            "| {name} | {proof} | {} | {} |",
            cell(*server),
            cell(*agent)
        )
        .expect("a string takes it");
    }
    text
}

/// Upstream (configuration): Command lines of platforms start.
#[test]
fn command_lines_of_platforms_start() {
    const TEST: &str = "platforms::command_lines_of_platforms_start";
    let program = named_program().unwrap_or_else(|| env!("CARGO_BIN_EXE_adit").into());
    let files = ThrowawayFiles::create(&["localhost".to_owned()]).unwrap();
    // The programs are called by the platforms' names.
    let dir = TempDir::new().unwrap();
    let links: BTreeMap<&str, _> = ["proxy-server", "proxy-agent", "konnectivity-server"]
        .into_iter()
        .map(|name| {
            let link = dir.path().join(name);
            std::os::unix::fs::symlink(&program, &link).unwrap();
            (name, link)
        })
        .collect();
    let mut rows = Vec::new();
    for platform in PLATFORMS {
        let mut outcomes = [None, None];
        for (outcome, end) in outcomes.iter_mut().zip([&platform.server, &platform.agent]) {
            let Some(end) = end else { continue };
            match start(end, &links[end.called], &files, dir.path()) {
                Ok(starts) => *outcome = Some(starts),
                Err(why) => return skip_unprivileged(TEST, why),
            }
        }
        rows.push((platform, outcomes));
    }
    let table = table(&rows);
    assert!(!table.contains("refused"), "{table}");
    let page = fs::read_to_string(PAGE).unwrap();
    let has = page
        .split_once(BEGIN)
        .and_then(|(_, rest)| rest.split_once(END));
    let (has, _rest) = has.expect("docs/reference/platforms.md has a place for the table");
    assert!(
        has.trim() == table.trim(),
        "docs/reference/platforms.md has another table than this run:\n{table}"
    );
}

/// Does nothing outside the inner process.
#[test]
fn inside() {
    let Some(task) = std::env::var_os(INSIDE) else {
        return;
    };
    println!("inside");
    let task: Value = serde_json::from_str(task.to_str().unwrap()).unwrap();
    let text = |name: &str| task[name].as_str().unwrap().to_owned();
    let flags: Vec<&str> = task["flags"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let env = task["env"].as_array().unwrap().iter();
    let env = env.map(|pair| [0, 1].map(|at| pair[at].as_str().unwrap()));
    let prepared = prepare(&flags, Path::new(&text("files")), &text("settings"));
    if let Err(error) = prepared {
        println!("a file system cannot be prepared: {error}");
        return;
    }
    let mut child = Command::new(text("program"))
        .arg0(text("called"))
        .args(&flags)
        // As in a pod.
        .env("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        .env("KUBERNETES_SERVICE_PORT", "443")
        .envs(env.map(<(&str, &str)>::from))
        // The tests' own, which would win over a file.
        .env_remove("ADIT_ADMIN_SOCKET")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let health = u16::try_from(task["health"].as_u64().unwrap()).unwrap();
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        if let Some(status) = child.try_wait().unwrap() {
            println!("it ended: {status}");
            return;
        }
        if healthy(health) {
            println!("{STARTS}");
            // The socket is opened before the health port.
            if has_status(&text("program")) {
                println!("{OPERATED}");
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn has_status(program: &str) -> bool {
    let mut status = Command::new(program);
    status.arg0("adit").args(["status", "--json"]);
    // Where a program of the platform would have its socket by default.
    status.env("ADIT_ADMIN_SOCKET", "/run/adit/server.sock");
    status.output().is_ok_and(|answer| answer.status.success())
}

fn healthy(port: u16) -> bool {
    let answer = http::get(([127, 0, 0, 1], port).into(), "/healthz");
    answer.is_ok_and(|answer| answer.status == 200)
}

/// Makes the platforms' folders writable with overlays, and writes the files that the flags name.
fn prepare(flags: &[&str], files: &Path, settings: &str) -> Result<(), String> {
    let run = |program: &str, args: &[&str]| {
        let output = Command::new(program)
            .args(args)
            .output()
            .map_err(|error| format!("{program}: {error}"))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(format!(
                "{program} {args:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            ))
        }
    };
    run("ip", &["link", "set", "lo", "up"])?;
    // The files are read before the mounts, which may hide them.
    let of = |name: &str| fs::read(files.join(name)).map_err(|error| error.to_string());
    let (cert, key, ca) = (of("server.crt")?, of("server.key")?, of("ca.crt")?);
    run("mount", &["-t", "tmpfs", "tmpfs", "/mnt"])?;
    for folder in ["etc", "var", "run"] {
        let [upper, work] = ["upper", "work"].map(|kind| format!("/mnt/{folder}-{kind}"));
        for path in [&upper, &work] {
            fs::create_dir(path).map_err(|error| error.to_string())?;
        }
        let options = format!("lowerdir=/{folder},upperdir={upper},workdir={work}");
        run(
            "mount",
            &[
                "-t",
                "overlay",
                "overlay",
                "-o",
                &options,
                &format!("/{folder}"),
            ],
        )?;
    }
    let put = |path: &str, content: &[u8]| {
        let folder = Path::new(path).parent().unwrap_or_else(|| Path::new("/"));
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(path, content))
            .map_err(|error| format!("{path}: {error}"))
    };
    let secrets = "/var/run/secrets/kubernetes.io/serviceaccount";
    if !settings.is_empty() {
        put("/etc/adit/server.toml", settings.as_bytes())?;
    }
    put(&format!("{secrets}/token"), b"a.b.c")?;
    put(&format!("{secrets}/namespace"), b"kube-system")?;
    put(&format!("{secrets}/ca.crt"), &ca)?;
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": true}}],
        "users": [{"name": "a", "user": {"token": "a.b.c"}}],
    });
    for flag in flags {
        let Some((name, path)) = flag
            .split_once('=')
            .filter(|(_, value)| value.starts_with('/'))
        else {
            continue;
        };
        match name {
            "--kubeconfig" => put(path, kubeconfig.to_string().as_bytes())?,
            "--service-account-token-path" => put(path, b"a.b.c\n")?,
            "--uds-name" => put(&format!("{path}.folder"), b"")?,
            "--log-file" => (),
            name if name.ends_with("-key") => put(path, &key)?,
            name if name.ends_with("ca-cert") => put(path, &ca)?,
            name if name.ends_with("-cert") => put(path, &cert)?,
            other => return Err(format!("{other} names a file that no platform has")),
        }
    }
    Ok(())
}
