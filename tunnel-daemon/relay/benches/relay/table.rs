//! One table of rows: rounds alternate between the drivers, and the best of each is shown with the spread.

use std::{
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use crate::rig::{self, Rig, Row};

const ROUNDS: usize = 5;
/// Per round and stream count, in all.
const BULK: usize = 768 << 20;
const ECHO: Duration = Duration::from_millis(700);

/// Best and worst of the rounds.
#[derive(Clone, Copy)]
struct Range {
    low: f64,
    high: f64,
}

impl Range {
    fn new() -> Self {
        Self {
            low: f64::INFINITY,
            high: 0.0,
        }
    }

    fn add(&mut self, value: f64) {
        self.low = self.low.min(value);
        self.high = self.high.max(value);
    }
}

#[derive(Clone, Copy)]
struct Line {
    bulk: [Range; 2],
    echo_p50: Range,
    echo_rate: [Range; 3],
    calls: [f64; 3],
    /// CPU of the relay thread for one echo, microseconds.
    echo_cpu: [Range; 3],
    cpu_per_gib: Range,
}

const STREAMS: [usize; 2] = [1, 8];
const CONNECTIONS: [usize; 3] = [1, 16, 128];

/// Measures the rows and prints them; `echo_only` leaves bulk out.
pub(crate) fn print(rows: &[Row], echo_only: bool) {
    let mut lines = vec![
        Line {
            bulk: [Range::new(); 2],
            echo_p50: Range::new(),
            echo_rate: [Range::new(); 3],
            calls: [f64::INFINITY; 3],
            echo_cpu: [Range::new(); 3],
            cpu_per_gib: Range::new(),
        };
        rows.len()
    ];
    for round in 0..ROUNDS {
        for (row, line) in rows.iter().zip(&mut lines) {
            if !echo_only {
                bulk(*row, line);
            }
            for (at, connections) in CONNECTIONS.into_iter().enumerate() {
                echo(*row, connections, at, line);
            }
        }
        eprintln!("round {} of {ROUNDS}", round + 1);
    }
    println!(
        "| row | bulk 1, Gbit/s | bulk 8 | relay thread s/GiB | echo p50 us | echoes/s 1 | 16 | 128 | relay thread us per echo 1 | 16 | 128 | calls per echo 1 / 16 / 128 |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (row, line) in rows.iter().zip(&lines) {
        let most =
            |range: &Range, digits| format!("{:.digits$} ({:.digits$})", range.high, range.low);
        let least =
            |range: &Range, digits| format!("{:.digits$} ({:.digits$})", range.low, range.high);
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.2} / {:.2} / {:.2} |",
            row.name(),
            most(&line.bulk[0], 1),
            most(&line.bulk[1], 1),
            least(&line.cpu_per_gib, 3),
            least(&line.echo_p50, 1),
            most(&line.echo_rate[0], 0),
            most(&line.echo_rate[1], 0),
            most(&line.echo_rate[2], 0),
            least(&line.echo_cpu[0], 2),
            least(&line.echo_cpu[1], 2),
            least(&line.echo_cpu[2], 2),
            line.calls[0],
            line.calls[1],
            line.calls[2],
        );
    }
}

fn bulk(row: Row, line: &mut Line) {
    for (streams, range) in STREAMS.into_iter().zip(&mut line.bulk) {
        let rig = Rig::start(row);
        let opened = rig.open_many(row, streams);
        rig::push(&opened.tunnels, 4 << 20); // Windows and buffers have grown after this.
        let (start, cpu) = (Instant::now(), relay_cpu());
        rig::push(&opened.tunnels, BULK / streams);
        let bits = BULK as f64 * 8.0;
        range.add(bits / start.elapsed().as_secs_f64() / 1e9);
        if streams == 1 {
            let gib = BULK as f64 / f64::from(1 << 30);
            line.cpu_per_gib.add((relay_cpu() - cpu) / gib);
        }
        opened.close();
    }
}

/// All connections in one asking and one answering thread, so that peers cost the same in each row.
fn echo(row: Row, connections: usize, at: usize, line: &mut Line) {
    let rig = Rig::start(row);
    let opened = rig.open_many(row, connections);
    let tunnels = &opened.tunnels;
    let answering = thread::spawn({
        let sockets: Vec<_> = tunnels
            .iter()
            .map(|tunnel| tunnel.target.try_clone().expect("a descriptor"))
            .collect();
        move || {
            let mut message = [0; 64];
            loop {
                for mut socket in &sockets {
                    if socket.read_exact(&mut message).is_err()
                        || socket.write_all(&message).is_err()
                    {
                        return;
                    }
                }
            }
        }
    });
    let (calls_before, cpu) = (rig.calls(&opened), relay_cpu());
    let (start, mut echoes, mut times) = (Instant::now(), 0_u32, Vec::new());
    while start.elapsed() < ECHO {
        let asked = Instant::now();
        let mut message = [1; 64];
        for tunnel in tunnels {
            (&tunnel.client).write_all(&message).expect("sends");
        }
        for tunnel in tunnels {
            (&tunnel.client).read_exact(&mut message).expect("receives");
            echoes += 1;
        }
        times.push(asked.elapsed());
    }
    let rate = f64::from(echoes) / start.elapsed().as_secs_f64();
    let calls = (rig.calls(&opened) - calls_before) as f64 / f64::from(echoes);
    line.echo_rate[at].add(rate);
    line.echo_cpu[at].add((relay_cpu() - cpu) * 1e6 / f64::from(echoes));
    line.calls[at] = line.calls[at].min(calls);
    if connections == 1 {
        times.sort_unstable();
        line.echo_p50
            .add(times[times.len() / 2].as_secs_f64() * 1e6);
    }
    opened.close();
    answering.join().expect("the answering thread ends");
}

/// CPU seconds of the threads that relay so far, one or the two of `tls_legs`: from the kernel's own account.
fn relay_cpu() -> f64 {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir("/proc/self/task")
        .expect("procfs")
        .flatten()
    {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with("relay-") {
            let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let first = text.split_whitespace().next().unwrap_or("0");
            nanoseconds += first.parse::<f64>().unwrap_or(0.0);
        }
    }
    nanoseconds / 1e9
}
