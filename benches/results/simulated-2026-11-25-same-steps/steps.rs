use std::time::{Duration, Instant};
use vpmm::*;
use vpmm_cli::trace::{Action, Trace};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let trace = Trace::open(&a[1]).unwrap();
    let steps: usize = a[2].parse().unwrap();
    let paced = a.get(3).is_some_and(|x| x == "paced");
    let sim =
        cuda_sim::Simulator::builder().costs(cuda_sim::Costs::h200()).detect_races(false).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut c = PoolConfig::default();
    c.va_size_bytes = Some(1 << 40);
    if let Ok(l) = std::env::var("LIMIT") {
        c.limit_bytes = Some(
            (l.parse::<f64>().unwrap() * trace.peak_live_bytes as f64) as u64 / (2 << 20) * (2 << 20)
                + (2 << 20),
        );
    }
    let pool = Pool::new(&device, &c).unwrap();
    let streams: Vec<Stream> = (0..trace.streams).map(|_| device.stream().unwrap()).collect();
    let factor: f64 = std::env::var("FACTOR").ok().map_or(1.0, |v| v.parse().unwrap());
    let per = trace.operations.len() / steps;
    // oracle: which blocks are live at their step's crest
    let n = trace.allocations.len();
    let mut from = vec![usize::MAX; n];
    let mut to = vec![usize::MAX; n];
    let mut s = 0u64;
    let mut crest = vec![(0u64, 0usize); steps + 1];
    for (at, op) in trace.operations.iter().enumerate() {
        let slot = op.slot as usize;
        match op.action {
            Action::Allocate => {
                from[slot] = at;
                s += trace.allocations[slot].bytes;
            }
            Action::Free => {
                to[slot] = at;
                s -= trace.allocations[slot].bytes;
            }
        }
        let k = at / per;
        if s > crest[k].0 {
            crest[k] = (s, at);
        }
    }
    let survives = |slot: usize| {
        (from[slot] / per..=(to[slot].min(trace.operations.len() - 1)) / per)
            .any(|k| from[slot] <= crest[k].1 && crest[k].1 < to[slot])
    };
    let pred = std::env::var("PRED").unwrap_or("oracle".into());
    use std::collections::HashMap;
    let large = |b: u64| b > 65536;
    let mut mark = 0u64;
    let mut low = true;
    let mut lv = 0u64; // tide
    // of the round: slot -> key; crest
    let mut keys: HashMap<u32, ((u64, u32), usize)> = HashMap::new();
    let mut ord: HashMap<u64, u32> = HashMap::new();
    let mut all = 0u32;
    let mut rmax = 0u64;
    let mut rcrest = 0usize;
    let mut ended: Vec<((u64, u32), usize, usize)> = vec![];
    let mut hist: Vec<u64> = vec![];
    let mut maj: HashMap<u64, i64> = HashMap::new();
    let mut table: HashMap<(u64, u32), bool> = HashMap::new();
    let (mut right, mut wrong, mut unknown) = (0u64, 0u64, 0u64);
    let mut live: Vec<Option<DevicePtr>> = vec![None; n];
    let mut peak = 0u64;
    let mut sum = 0u64;
    let mut last = sim.modelled_us();
    let (mut c0, mut m0, mut g, mut d0) = (0, 0, 0, 0.0);
    let mut longest = 0.0f64;
    let begin = Instant::now();
    for (at, op) in trace.operations.iter().enumerate() {
        if paced {
            let left = trace.times[at].saturating_sub(begin.elapsed());
            if left > Duration::from_micros(100) {
                std::thread::sleep(left);
            }
        }
        let s = &streams[op.stream as usize];
        let slot = op.slot as usize;
        let b = (trace.allocations[slot].bytes as f64 * factor).ceil() as usize;
        match op.action {
            Action::Allocate => {
                let key = if pred.starts_with("rat") {
                    let k: usize = pred[3..4].parse().unwrap();
                    let q: f64 = pred[4..].trim_end_matches('f').parse().unwrap_or(16.0);
                    let mut h = 7u64;
                    let mut cur = b as u64;
                    for e in hist.iter().rev().take(k) {
                        let f = e >> 62;
                        let v = e & !(3 << 62);
                        let r = ((cur as f64 / v as f64).log2() * q).round() as i64 as u64;
                        h = (h.rotate_left(7) ^ r ^ (f << 40)).wrapping_mul(0x9E3779B97F4A7C15);
                        cur = v;
                    }
                    (h | 1 << 63, 0)
                } else if pred.starts_with("ctx") {
                    let k: usize = pred[3..4].parse().unwrap();
                    let mut h = b as u64;
                    for e in hist.iter().rev().take(k) {
                        h = (h.rotate_left(7) ^ *e).wrapping_mul(0x9E3779B97F4A7C15);
                    }
                    (h | 1 << 63, 0)
                } else if pred == "all" {
                    (0u64, all)
                } else {
                    (b as u64, *ord.get(&(b as u64)).unwrap_or(&0))
                };
                if large(b as u64) {
                    *ord.entry(b as u64).or_default() += 1;
                    all += 1;
                    keys.insert(slot as u32, (key, at));
                }
                let h = if pred == "major" {
                    match maj.get(&(b as u64)) {
                        Some(v) if *v > 0 => 1,
                        Some(_) => 2,
                        None => 0,
                    }
                } else if pred == "oracle" {
                    if survives(slot) { 1 } else { 2 }
                } else {
                    match table.get(&key) {
                        Some(true) => 1,
                        Some(false) => 2,
                        None => 0,
                    }
                };
                if large(b as u64) {
                    if h == 0 {
                        unknown += 1
                    } else if (h == 1) == survives(slot) {
                        right += 1
                    } else {
                        wrong += 1
                    }
                }
                if large(b as u64) {
                    hist.push(b as u64);
                    if hist.len() > 64 {
                        hist.drain(..32);
                    }
                }
                vpmm::hint(h);
                match pool.malloc(b.max(1), s) {
                    Ok(p) => live[slot] = Some(p),
                    Err(_) => {
                        println!("OOM at step {}", at / per + 1);
                        return;
                    }
                }
                sum += b as u64;
                peak = peak.max(sum);
            }
            Action::Free => {
                if large(b as u64) && pred.ends_with('f') {
                    hist.push(b as u64 | 1 << 62);
                    if hist.len() > 64 {
                        hist.drain(..32);
                    }
                }
                if let Some(q) = live[slot].take() {
                    pool.free(q, s).unwrap();
                    sum -= b as u64;
                }
            }
        }
        match op.action {
            Action::Allocate => lv += b as u64,
            Action::Free => {
                lv -= b as u64;
                if let Some((key, t)) = keys.remove(&(slot as u32)) {
                    ended.push((key, t, at));
                }
            }
        }
        if lv > rmax {
            rmax = lv;
            rcrest = at;
        }
        let ebbs = lv < mark;
        if ebbs {
            if !low {
                // a new round
                for (key, t, e) in ended.drain(..) {
                    let v = t <= rcrest && rcrest < e;
                    table.insert(key, v);
                    let m = maj.entry(key.0).or_default();
                    *m = (*m + if v { 1 } else { -1 }).clamp(-64, 64);
                }
                for (_, (key, t)) in keys.iter() {
                    let v = *t <= rcrest;
                    table.insert(*key, v);
                    let m = maj.entry(key.0).or_default();
                    *m = (*m + if v { 1 } else { -1 }).clamp(-64, 64);
                }
                // what is still there belongs to the new round's start for nobody
                keys.clear();
                ord.clear();
                all = 0;
                rmax = 0;
            }
            low = true;
            mark = lv / 8 * 7;
        } else {
            let m = lv / 8 * 5;
            if m > mark {
                low = false;
                mark = m;
            }
        }
        let now = sim.modelled_us();
        if now - last > 10.0 {
            g += 1;
            longest = longest.max(now - last);
        }
        last = now;
        if (at + 1) % per == 0 {
            let k = (at + 1) / per;
            let st = pool.stats();
            if k < 4 || k == 8 || k == 20 || k == 50 || k == steps {
                println!(
                    "step {k}: grew {g} made {} moved {} driver {:.2} ms longest {:.2}; held {:.4} of peak {} | right {right} wrong {wrong} unknown {unknown}",
                    st.extents_created - c0,
                    st.extents_moved - m0,
                    (now - d0) / 1e3,
                    longest / 1e3,
                    st.peak_mapped_bytes as f64 / peak as f64,
                    peak >> 20
                );
            }
            c0 = st.extents_created;
            m0 = st.extents_moved;
            g = 0;
            d0 = now;
            longest = 0.0;
        }
    }
}
