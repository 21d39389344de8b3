import asyncio

running = 0
peak = 0


async def compute_score(data_source, solution_str, ground_truth, extra_info):
    global running, peak
    running += 1
    peak = max(peak, running)
    await asyncio.sleep(0.05)  # here a user posts to a judge by aiohttp
    running -= 1
    return {"score": float(str(ground_truth) in solution_str), "peak": peak}
